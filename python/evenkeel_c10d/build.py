"""Compiles the bridge for the Python that runs this script, and for its PyTorch.

    python build.py --library DIR/libevenkeel.so --include DIR --out DIR [--torch DIR]...

`--include` contains evenkeel/comm/abi/group.h; a checkout of evenkeel will do. `--out` becomes a
directory for PYTHONPATH: the package evenkeel_c10d with its libraries, and the metadata by which
init_process_group("evenkeel") finds it. Each `--torch` is a folder that contains another PyTorch for
this Python, such as an unpacked wheel of it, and gets a bridge.
"""

import argparse
import concurrent.futures
import ctypes
import importlib.util
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = ("backend.cc", "module.cc", "store.cc", "tensors.cc", "work.cc")
# Large operations are copies by torch and arithmetic by evenkeel: optimizing the bridge gains
# nothing that can be measured, and costs a third of the build.
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-DNDEBUG")


def library_version(library):
    """Returns the version that libevenkeel.so reports."""
    version = ctypes.CDLL(str(library))._ZN8evenkeel3abi7VersionEv
    version.restype = ctypes.c_char_p
    return version().decode()


def soname(library):
    """Returns the name by which programs look for the library."""
    dynamic = subprocess.run(["readelf", "-d", str(library)], check=True, stdout=subprocess.PIPE, text=True)
    return re.search(r"SONAME.*\[(.*)\]", dynamic.stdout)[1]


def include_root(include, scratch):
    """Returns a directory in which `evenkeel/comm/abi/group.h` is found."""
    if (include / "evenkeel" / "comm" / "abi" / "group.h").exists():
        return include
    if not (include / "comm" / "abi" / "group.h").exists():
        sys.exit(f"build.py: {include} contains neither evenkeel/comm/abi/group.h nor comm/abi/group.h")
    (scratch / "evenkeel").symlink_to(include, target_is_directory=True)
    return scratch


def own_torch():
    """Returns the folder that contains the PyTorch of this Python."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        sys.exit(f"build.py: {sys.executable} has no torch: install it, or pass --torch")
    return pathlib.Path(spec.origin).parent.parent


def bridge_for(torch):
    """Returns the name of the bridge for the PyTorch in a folder."""
    version = torch / "torch" / "version.py"
    if not version.exists():
        sys.exit(f"build.py: --torch {torch}: {version} does not exist")
    names = runpy.run_path(str(HERE / "evenkeel_c10d" / "_torches.py"))
    return names["bridge_for"](str(runpy.run_path(str(version))["__version__"]))


def compile_bridge(torch, library, include, package, version, compiler):
    """Compiles the sources and links them to a library in `package`."""
    bridge = bridge_for(torch)
    target = package / (bridge + sysconfig.get_config_var("EXT_SUFFIX"))
    headers = torch / "torch" / "include"
    with tempfile.TemporaryDirectory() as scratch:
        includes = [include_root(include, pathlib.Path(scratch)), HERE]
        system = [
            headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]
        ]
        subprocess.run(
            [
                *compiler,
                *FLAGS,
                f'-DEVENKEEL_VERSION="{version}"',
                f"-DEVENKEEL_BRIDGE={bridge}",
                *(f"-I{path}" for path in includes),
                *(f"-isystem{path}" for path in system),
                "-shared",
                *("-x", "c++", "-", "-x", "none"),
                *("-o", str(target)),
                f"-L{torch / 'torch' / 'lib'}",
                *("-ltorch_python", "-ltorch_cpu", "-lc10"),
                str(library),
                "-Wl,-rpath,$ORIGIN",
                "-Wl,--as-needed",
                "-Wl,-s",
            ],
            # At once, since torch's headers take most of the time.
            input="".join(f'#include "{source}"\n' for source in SOURCES),
            text=True,
            check=True,
        )


def write_metadata(out, version):
    """Writes what importlib.metadata reads, as an installation by pip does."""
    folder = out / f"evenkeel_c10d-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: evenkeel-c10d\nVersion: {version}\n"
    )
    (folder / "entry_points.txt").write_text(
        "[torch.distributed.backends]\nevenkeel = evenkeel_c10d:register\n"
        "[torch.backends]\nevenkeel = evenkeel_c10d_autoload:autoload\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--include", type=pathlib.Path, default=HERE.parent.parent)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--torch", type=pathlib.Path, action="append")
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()

    library = args.library.resolve()
    version = library_version(library)
    package = args.out.resolve() / "evenkeel_c10d"
    shutil.copytree(
        HERE / "evenkeel_c10d", package, dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy2(HERE / "evenkeel_c10d_autoload.py", package.parent)
    # Not over a file that a process may have mapped.
    copy = package / soname(library)
    copy.unlink(missing_ok=True)
    shutil.copy2(library, copy)
    # Python would prefer one that an older build.py named _bridge to _bridge.py.
    for old in package.glob("_bridge*.so"):
        old.unlink()
    common = (copy, args.include.resolve(), package, version, shlex.split(args.compiler))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda torch: compile_bridge(torch, *common), args.torch or [own_torch()]))
    write_metadata(args.out.resolve(), version)


if __name__ == "__main__":
    main()
