#!/usr/bin/env python3
"""Records what Hugging Face's tokenizers make of odd strings.

    pip install tokenizers==0.22.1
    python3 tests/testdata/tokenizer/record.py FOLDER

Writes hf_tokenizer.json, a tokenizer of 1,000 pieces that BpeTrainer made of the strings, and odd_strings.json.gz: the
10,000 strings and their tokens.
"""

import gzip
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers

WORDS = """the of and a to in is you that it he was for on are as with his they at be this have from or one had by word
but not what all were we when your can said there use an each which she do how their if will up other about out many
then them these so some her would make like him into time has look two more write go see number no way could people my
than first water been call who oil its now find long down day did get come made may part I'm don't we'll they've it's
you're he'd I'M DON'T We'Ll 's 't 're 've 'm 'll 'd 'S 'x''s ' '' hello HELLO World naïve café Straße über Ωμέγα мир
Привет שלום مرحبا नमस्ते 你好 世界 こんにちは 한국어 ไทย 𝓗𝓮𝓵𝓵𝓸 ﬁ ½ Ⅷ ² ٣٤ १२ 0 1 12 123 3.14 1,000 0x1F 2024-11-26 a1b2
{} [] () <> <html> </p> && || == != -> => ... -- --- ___ $$ %% ## @@ // \\\\ ~ ` ^ * + ; : ? ! " ' # € £ ¥ © ™ • – — “ ” ‘ ’""".split()
SPACES = [" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \t ", "\u00a0", "\u2003", "\u3000", "\u2028", "\u2029",
          "\u0085", "\u1680", "\u202f", "\u205f", "\u200b", "\ufeff", "\u180e", "\x0b", "\x0c", "\x1c", "\x1f", "", "", ""]
ODD = ["\x00", "\x01", "\x7f", "\xad", "\u0301", "a\u0301", "e\u0308\u0301", "\u200d", "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪", "🏳️‍🌈", "\ue000", "\ufffd",
       "\ufffe", "\U000f0000", "\U0010ffff", "\u0378", "ǅ", "ʰ", "ª", "ـ", "\u06dd", "𐍈", "𝟘", "①", "〇", "々", "ー", "·", "_",
       "<|endoftext|>", "<|endoftext", "|>", "Ġ", "Ċ", "Ā"]


def odd_string(source):
    kind = source.random()
    if kind < 0.05:  # Any characters.
        points = [source.choice([source.randrange(0x80), source.randrange(0x800), source.randrange(0x10000),
                                 source.randrange(0x110000)]) for _ in range(source.randrange(12))]
        return "".join(chr(p) for p in points if not 0xd800 <= p < 0xe000)
    if kind < 0.08:  # One piece over and over.
        return source.choice(WORDS + SPACES + ODD) * source.randrange(1, 60)
    parts = []
    for _ in range(source.randrange(1, 9)):
        parts.append(source.choice(WORDS if source.random() < 0.85 else ODD))
        parts.append(source.choice(SPACES))
    return "".join(parts)


def main():
    folder = Path(sys.argv[1])
    source = random.Random(19)
    strings = [odd_string(source) for _ in range(10_000)]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The pieces come first, so that their numbers are those of a tokenizer without added tokens.
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(strings, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "hf_tokenizer.json"), pretty=False)

    tokens = [tokenizer.encode(string, add_special_tokens=False).ids for string in strings]
    text = json.dumps({"strings": strings, "tokens": tokens}, separators=(",", ":"))
    (folder / "odd_strings.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(len(strings), "strings,", sum(map(len, tokens)), "tokens")


if __name__ == "__main__":
    main()
