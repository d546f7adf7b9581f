"""Shows that reproduce.py fails on the installed torch and passes with zero_join.patch.

    OMP_NUM_THREADS=1 python join_zero_test.py

The installed torch stays as it is: the patch is applied to copies in a temporary folder that links
to everything else. A torch that passes without the patch ends the test with success.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PATCH = HERE / "zero_join.patch"


def patched_torch(folder):
    """Makes `folder`/torch: links to the installed torch, patched copies of the affected files."""
    site = pathlib.Path(importlib.util.find_spec("torch").origin).parents[1]
    for name in re.findall(r"^\+\+\+ b/(\S+)", PATCH.read_text(), flags=re.MULTILINE):
        for level in reversed(pathlib.PurePath(name).parents[:-1]):
            if (folder / level).is_symlink():
                (folder / level).unlink()
            (folder / level).mkdir(exist_ok=True)
            for entry in (site / level).iterdir():
                if not (folder / level / entry.name).exists() and entry.name != "__pycache__":
                    (folder / level / entry.name).symlink_to(entry)
        (folder / name).unlink()
        shutil.copyfile(site / name, folder / name)
    subprocess.run(["patch", "-p1", "-i", PATCH], cwd=folder, check=True)


def reproduce(**environment):
    command = [sys.executable, "-W", "ignore", str(HERE / "reproduce.py")]
    return subprocess.run(command, env=os.environ | environment, timeout=300).returncode


def main():
    print("Installed torch:", flush=True)
    if reproduce() == 0:
        print("PASS: the installed torch is right without the patch.")
        return
    with tempfile.TemporaryDirectory() as name:
        patched_torch(pathlib.Path(name))
        print("Patched torch:", flush=True)
        path = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        if reproduce(PYTHONPATH=path) != 0:
            sys.exit("FAIL: the patched torch trains wrong weights.")
    print("PASS: the installed torch is wrong, the patched one is right.")


if __name__ == "__main__":
    main()
