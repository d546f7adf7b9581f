"""Applies a patch to copies of an installed package, which stays as it is.

    patched(pathlib.Path("ignite.patch"), folder)       # then with `folder` first in PYTHONPATH

The paths in the patch are those below site-packages: a/ignite/..., b/ignite/....
"""

import importlib.util
import pathlib
import re
import shutil
import subprocess


def patched(patch, folder):
    """Makes `folder`/package: links to the installed one, and patched copies of what changes."""
    for name in re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), flags=re.MULTILINE):
        package = pathlib.PurePath(name).parts[0]
        site = pathlib.Path(importlib.util.find_spec(package).origin).parents[1]
        for level in reversed(pathlib.PurePath(name).parents[:-1]):
            if (folder / level).is_symlink():
                (folder / level).unlink()
            (folder / level).mkdir(exist_ok=True)
            for entry in (site / level).iterdir():
                if not (folder / level / entry.name).exists() and entry.name != "__pycache__":
                    (folder / level / entry.name).symlink_to(entry)
        (folder / name).unlink()
        shutil.copyfile(site / name, folder / name)
    subprocess.run(["patch", "--quiet", "-p1", "-i", patch], cwd=folder, check=True)
