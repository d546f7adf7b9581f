"""Names of bridges. build.py runs this file, so it imports neither torch nor the package."""

import re


def bridge_for(version):
    """Returns the name of the bridge for a version of torch.

    Releases of one minor version share a bridge; a build between releases has one of its own.
    """
    release = re.match(r"(\d+)\.(\d+)\.\d+(\.post\d+)?(\+|$)", version)
    return "_bridge_" + ("_".join(release.groups()[:2]) if release else re.sub(r"\W", "_", version))


def described(file):
    """Returns the versions of torch and Python that a bridge fits, from its file's name."""
    torch, major, minor = re.match(r"_bridge_(\w+)\.cpython-(\d)(\d+\w*)-", file).groups()
    return f"torch {torch.replace('_', '.')} with Python {major}.{minor}"
