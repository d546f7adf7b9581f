"""The bridge between libevenkeel.so and the torch of this process, picked from those of the wheel.

c10d is no part of torch's stable ABI, and pybind11 uses all of Python's, so each minor version of
either needs a bridge of its own. This module is replaced by the one that fits.
"""

import importlib
import pathlib
import platform
import sys

import torch

from ._torches import bridge_for, described


def _load():
    version = str(torch.__version__)
    name = f"{__package__}.{bridge_for(version)}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    files = pathlib.Path(__file__).parent.glob("_bridge_*.so")
    built = ", ".join(sorted(described(path.name) for path in files))
    python = platform.python_version()
    raise ImportError(
        f"evenkeel_c10d has no bridge for torch {version} with Python {python}. It has bridges for "
        f"{built}. Install one of these, or make a wheel for this torch: "
        'docs/pytorch.md, "Install".'
    )


sys.modules[__name__] = _load()
