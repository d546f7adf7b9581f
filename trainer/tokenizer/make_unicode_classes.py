#!/usr/bin/env python3
"""Writes unicode_classes.inc, the classes of characters by which split_words.cc splits a text.

    pip install tokenizers==0.22.1 unicodedata2==16.0.0
    python3 trainer/tokenizer/make_unicode_classes.py > trainer/tokenizer/unicode_classes.inc

The classes are those of tokenizers 0.22, whose expressions know Unicode 16.0; the script ends with an error if
Unicode's own data of that version has other letters or numbers.
"""

from itertools import groupby

import unicodedata2
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

WIDTH = 94


def members(expression):
    """The characters that match; surrogates are none."""
    found = set()
    split = Split(Regex(expression + "+"), "removed")
    points = [point for point in range(0x110000) if not 0xd800 <= point < 0xe000]
    for first in range(0, len(points), 4096):
        part = points[first:first + 4096]
        rest = {i for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, part))) for i in range(begin, end)}
        found.update(point for i, point in enumerate(part) if i not in rest)
    return found


def main():
    letters, numbers, spaces = members(r"\p{L}"), members(r"\p{N}"), members(r"\s")
    for point in range(0x110000):
        category = unicodedata2.category(chr(point))[0]
        assert (category == "L") == (point in letters) and (category == "N") == (point in numbers), hex(point)
    classes = ("L" if p in letters else "N" if p in numbers else "S" if p in spaces else "O" for p in range(0x110000))
    runs = "".join(f"{kind}{sum(1 for _ in run)}" for kind, run in groupby(classes))
    print(f"// Unicode {unicodedata2.unidata_version}, written by make_unicode_classes.py: (L)etters, (N)umbers, white (S)pace and\n"
          "// (O)thers from U+0000 on, each with the number of characters of that class.")
    for first in range(0, len(runs), WIDTH):
        print(f'"{runs[first:first + WIDTH]}"')


if __name__ == "__main__":
    main()
