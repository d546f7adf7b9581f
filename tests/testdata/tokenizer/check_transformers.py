#!/usr/bin/env python3
"""Compares a folder that the trainer saved with what Hugging Face's transformers makes of it, and the other way round.

    pip install torch==2.15.0 transformers==5.15.1 tokenizers==0.22.1
    bazel build //trainer:train //trainer:generate
    bazel-bin/trainer/train --model=gpt --vocabulary=4096 --max_steps=200 --save=/tmp/jargon/
    python3 tests/testdata/tokenizer/check_transformers.py /tmp/jargon bazel-bin/trainer

The loss on the held-out text must be equal to 1e-6, the greedy text exactly. Then transformers saves the model into a
folder of its own, which is compared once more.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

TEXT = Path("/usr/share/doc/jargon-text/jargon.txt.gz")
PROMPT = "The hacker"
TOKENS = 60


def held_out(text, block):
    """The blocks that text_dataset.h holds out."""
    blocks = len(text) // block
    for i in range(19, blocks, 20):
        yield text[i * block:len(text) if i + 1 == blocks else (i + 1) * block]


def sequences(tokens, context):
    """sequences.h: the last one is moved back to end with the run."""
    for begin in range(0, len(tokens) - 1, context):
        begin = min(begin, len(tokens) - 1 - context)
        yield tokens[begin:begin + context + 1]


def loss_of_transformers(model, tokenizer, text):
    context = model.config.n_positions
    rows = []
    for block in held_out(text, max(4096, 16 * context)):
        rows += sequences(tokenizer(block.decode(), add_special_tokens=False)["input_ids"], context)
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(rows), 16):
            batch = torch.tensor(rows[first:first + 16])
            scores = model(batch[:, :-1]).logits.double()
            total += torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(),
                                                       reduction="sum").item()
    return total / (len(rows) * context)


def loss_of_trainer(programs, folder, text):
    with tempfile.TemporaryDirectory() as scratch:
        path, metrics = Path(scratch) / "text.txt", Path(scratch) / "metrics.jsonl"
        path.write_bytes(text)
        subprocess.run([programs / "train", "--model=gpt", f"--init={folder}", "--lr=0", "--max_steps=1", "--nproc=1",
                        f"--data={path}", f"--metrics={metrics}"], check=True, capture_output=True)
        return json.loads(metrics.read_text().splitlines()[-1])["loss"]


def compare(folder, programs, text):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    ours, theirs = loss_of_trainer(programs, folder, text), loss_of_transformers(model, tokenizer, text)
    prompt = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    # No more than the context: beyond it the trainer drops the oldest tokens.
    written = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)
    greedy = tokenizer.decode(written[0], clean_up_tokenization_spaces=False)
    text = subprocess.run([programs / "generate", f"--weights={folder}", f"--prompt={PROMPT}", "--temperature=0",
                           f"--tokens={TOKENS}"], check=True, capture_output=True).stdout.decode(errors="replace")
    good = abs(ours - theirs) <= 1e-6 * max(1, theirs) and greedy == text and not caught
    print(f"{folder}: loss {ours:.7f}, of transformers {theirs:.7f}; greedy text {'equal' if greedy == text else 'differs'}"
          f"; {len(caught)} warnings: {'ok' if good else 'FAILED'}")
    if greedy != text:
        print(repr(greedy), repr(text), sep="\n")
    for warning in caught:
        print(warning.message)
    return good, model, tokenizer


def main():
    logging.set_verbosity_warning()
    folder, programs = Path(sys.argv[1]), Path(sys.argv[2])
    # ASCII, so that no block cuts a character in two: transformers takes characters, the trainer bytes.
    text = bytes(byte for byte in gzip.decompress(TEXT.read_bytes()) if byte < 128)
    good, model, tokenizer = compare(folder, programs, text)
    with tempfile.TemporaryDirectory() as theirs:
        model.save_pretrained(theirs)
        tokenizer.save_pretrained(theirs)
        good = compare(Path(theirs), programs, text)[0] and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
