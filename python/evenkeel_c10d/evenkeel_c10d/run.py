"""Runs a program whose groups that ask for gloo use evenkeel, and those of its child processes.

    python -m evenkeel_c10d.run program.py arguments
    python -m evenkeel_c10d.run -m module arguments
    torchrun --nproc-per-node=2 -m evenkeel_c10d.run program.py arguments
"""

import os
import runpy
import sys

from . import replace_gloo


def main():
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m evenkeel_c10d.run [-m module | program.py] [arguments]")
    replace_gloo()
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path:  # With it, sys.path[0] is not the program's folder.
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
