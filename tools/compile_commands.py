#!/usr/bin/env python3
"""Writes compile_commands.json, for clangd, clang-tidy and other tools that read sources.

    tools/compile_commands.py                  all sources
    tools/compile_commands.py //bucket/...     those of one folder

The commands are those of Bazel. They name headers below bazel-bin, which exist once the targets are
built. Run it again after a change of a BUILD file.
"""

import json
import sys

from aquery import ROOT, actions_of, argument_after

# Options of GCC that clang does not know.
FOR_GCC_ALONE = ("-fno-canonical-system-headers", "-Wunused-but-set-parameter", "-Wno-free-nonheap-object")


def main():
    if any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit(__doc__.strip())
    targets = " + ".join(sys.argv[1:]) or "//..."
    commands = [
        {
            "directory": str(ROOT),
            "file": argument_after(action["arguments"], "-c"),
            "output": argument_after(action["arguments"], "-o"),
            "arguments": [word for word in action["arguments"] if word not in FOR_GCC_ALONE],
        }
        for action in actions_of(f'mnemonic("CppCompile", {targets})')
        if "-c" in action["arguments"]
    ]
    if not commands:
        sys.exit(f"compile_commands: Bazel compiles nothing for {targets}")
    (ROOT / "compile_commands.json").write_text(json.dumps(commands, indent=1) + "\n")
    print(f"compile_commands.json: {len(commands)} commands")


if __name__ == "__main__":
    main()
