#!/usr/bin/env python3
"""Records what Hugging Face's software makes of tokenizers with unusual settings, and of the files beside them.

    python3 tests/testdata/tokenizer/record_folders.py folders.json

run with transformers 4.57.6, whose GPT2Tokenizer saves some of the files, and then with tokenizers 0.22.1 and
transformers 5.15.1. Writes folders.json: cases with files, strings, and their tokens by each version of the software that
reads the files. A case is vocab.json with merges.txt, or tokenizer.json: the small tokenizer "base" with a merge patch
(RFC 7396). `classes` are those of all characters: their numbers, and a checksum of them in order.
"""

import json
import sys
import tempfile
import zlib
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "b"), ("Ġ", "a"), ("ab", "c")]
END = "<|endoftext|>"
STRINGS = ["", " ", "the tool", " the<tool>in a<pad> b", "abc<|endoftext|>the", "<a><b><a>x", "<a><a><b>", "a<tool> the",
           "<tool><pad><|endoftext|>", "x <tool", "thein<the", "<|endoftext|> abc", "in<in>abc", "\u00e9<tool>\n\n the"]


def token(content, number=None, special=True, normalized=False, **flags):
    entry = {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized,
             "special": special} | flags
    return entry if number is None else {"id": number} | entry


def base():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet + ["".join(merge) for merge in MERGES] + [END])}
    tokenizer = Tokenizer(models.BPE(vocab, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return json.loads(tokenizer.to_str())


def slow_files(base, change):
    """What GPT2Tokenizer of transformers 4 saves, without vocab.json and merges.txt."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), base, {"is_vocabulary": True, "files": {}})
        tokenizer = transformers.GPT2Tokenizer.from_pretrained(folder)
        change(tokenizer)
        out = Path(folder) / "out"
        tokenizer.save_pretrained(out)
        return {path.name: json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if path.name != "vocab.json"}


def add_tool_and_pad(tokenizer):
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})


def add_prefix_space(tokenizer):
    add_tool_and_pad(tokenizer)
    tokenizer.add_prefix_space = tokenizer.init_kwargs["add_prefix_space"] = True


def cases(base):
    first = len(base["model"]["vocab"])
    end = token(END, first - 1)
    added = lambda *tokens: {"added_tokens": [end, *tokens]}
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]}
    # tokenizer.json alone.
    yield "normalized tokens match last", {"patch": added(token("<a>", first), token("<a><b>", first + 1, normalized=True))}
    yield "tokens that are not normalized match first", {
        "patch": added(token("<a><b>", first, normalized=True), token("<b>", first + 1), token("<tool>", first + 2, False, True))}
    yield "the last of equal merges counts", {"patch": {
        "model": {"vocab": {"he": first}, "merges": [["t", "h"], ["h", "e"], ["th", "e"], ["t", "h"]]}}}
    yield "a token of the vocabulary is added", {"patch": added(token("the", base["model"]["vocab"]["the"], False, True))}
    yield "two contents with one number", {"patch": added(token("<a>", first), token("<b>", first))}
    yield "numbers with a gap", {"patch": added(token("<a>", first + 7))}
    yield "two pieces with one number", {"patch": {"model": {"vocab": {"in": base["model"]["vocab"]["the"]}}}}
    yield "a template without tokens", {"patch": {"post_processor": template | {"special_tokens": {}}}}
    yield "a template with a token", {
        "patch": {"post_processor": template | {
            "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {END: {"id": END, "ids": [first - 1], "tokens": [END]}}}}}
    yield "no dropout", {"patch": {"model": {"dropout": 0.0}}}
    yield "an empty normalizer", {"patch": {"normalizer": {"type": "Sequence", "normalizers": []}}}
    yield "a space before", {"patch": {"pre_tokenizer": {"add_prefix_space": True}}}
    # Files beside tokenizer.json.
    yield "the same tokens beside", {"patch": added(token("<tool>", first, False, True)), "files": {
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "added_tokens_decoder": {
            str(first): token("<tool>", None, False, True)}}}}
    yield "a token only beside", {"patch": {}, "files": {
        "tokenizer_config.json": {"added_tokens_decoder": {str(first): token("<tool>")}}}}
    yield "a space only beside", {"patch": {}, "files": {
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}}
    yield "an end that is no added token", {"patch": {}, "files": {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "the"}}}
    # vocab.json and merges.txt.
    yield "a vocabulary", {"is_vocabulary": True, "files": {}}
    yield "added_tokens.json of old", {"is_vocabulary": True, "files": {
        "added_tokens.json": {"<tool>": first, "<pad>": first + 1}, "special_tokens_map.json": {"pad_token": "<pad>"}}}
    yield "added_tokens.json that overlaps", {"is_vocabulary": True, "files": {
        "added_tokens.json": {"<a>": first, "<a><b>": first + 1}, "special_tokens_map.json": {"pad_token": "<a>"}}}
    yield "added_tokens.json with a gap", {"is_vocabulary": True, "files": {"added_tokens.json": {"<tool>": first + 3}}}
    yield "a token with lstrip", {"is_vocabulary": True, "files": {
        "tokenizer_config.json": {"added_tokens_decoder": {str(first): token("<tool>", lstrip=True)}}}}
    yield "a beginning before each text", {"is_vocabulary": True, "files": {
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}}}
    if transformers.__version__.startswith("4."):
        yield "saved by GPT2Tokenizer", {"is_vocabulary": True, "files": slow_files(base, add_tool_and_pad)}
        yield "saved with a space before", {"is_vocabulary": True, "files": slow_files(base, add_prefix_space)}


def patched(value, patch):
    if not isinstance(patch, dict):
        return patch
    value = dict(value) if isinstance(value, dict) else {}
    return value | {name: patched(value.get(name), part) for name, part in patch.items()}


def write(folder, base, case):
    if case.get("is_vocabulary"):
        (folder / "vocab.json").write_text(json.dumps(base["model"]["vocab"], ensure_ascii=False))
        lines = ["#version: 0.2", *(" ".join(merge) for merge in base["model"]["merges"])]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    else:
        (folder / "tokenizer.json").write_text(json.dumps(patched(base, case["patch"]), ensure_ascii=False))
    for name, content in case.get("files", {}).items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False))


def classes():
    """Of each character by its neighbours in a word: a letter, a number, anything else, or white space."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    is_one = lambda text: len(split.pre_tokenize_str(text)) == 1
    points = [point for point in range(0x110000) if not 0xd800 <= point < 0xe000]
    found = "".join(next((kind for kind, first in zip("LNO", "a1!") if is_one(first + chr(point))), "S") for point in points)
    return {kind: found.count(kind) for kind in "LNOS"} | {"crc32": zlib.crc32(found.encode())}


def main():
    path = Path(sys.argv[1])
    recorded = json.loads(path.read_text()) if path.exists() else {"base": base(), "strings": STRINGS, "cases": {}}
    for name, case in (recorded["cases"] | dict(cases(recorded["base"]))).items():
        case = recorded["cases"].setdefault(name, case | {"tokens": {}})
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), recorded["base"], case)
            if not case.get("is_vocabulary") and not case.get("files"):
                tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
                case["tokens"]["tokenizers " + tokenizers.__version__] = [tokenizer.encode(s).ids for s in STRINGS]
                continue
            (Path(folder) / "config.json").write_text('{"model_type": "gpt2"}')
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            case["tokens"]["transformers " + transformers.__version__] = [tokenizer(s)["input_ids"] for s in STRINGS]
    recorded["classes"] = classes()
    path.write_text(json.dumps(recorded, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
