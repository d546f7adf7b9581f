"""Shows that reproduce.py fails on the installed torch and passes with zero_join.patch.

    OMP_NUM_THREADS=1 python join_zero_test.py

The installed torch stays as it is: the patch is applied to copies in a temporary folder that links
to everything else. A torch that passes without the patch ends the test with success.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "upstream"))
from patched import patched  # noqa: E402

PATCH = HERE / "zero_join.patch"


def reproduce(**environment):
    command = [sys.executable, "-W", "ignore", str(HERE / "reproduce.py")]
    return subprocess.run(command, env=os.environ | environment, timeout=300).returncode


def main():
    print("Installed torch:", flush=True)
    if reproduce() == 0:
        print("PASS: the installed torch is right without the patch.")
        return
    with tempfile.TemporaryDirectory() as name:
        patched(PATCH, pathlib.Path(name))
        print("Patched torch:", flush=True)
        path = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        if reproduce(PYTHONPATH=path) != 0:
            sys.exit("FAIL: the patched torch trains wrong weights.")
    print("PASS: the installed torch is wrong, the patched one is right.")


if __name__ == "__main__":
    main()
