"""Compiles the bridge for the Python and the PyTorch that run this script.

    python build.py --library DIR/libevenkeel.so --include DIR --out DIR

`--include` contains evenkeel/comm/abi/group.h; a checkout of evenkeel will do. `--out` becomes a
directory for PYTHONPATH: the package evenkeel_c10d with its libraries, and the metadata by which
init_process_group("evenkeel") finds it.
"""

import argparse
import concurrent.futures
import ctypes
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

import torch
from torch.utils import cpp_extension

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


def compile_bridge(library, include, target, version, compiler, jobs):
    """Compiles the sources and links them to `target`."""
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        includes = [include_root(include, scratch), HERE]
        system = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        common = [
            *compiler,
            *FLAGS,
            f'-DEVENKEEL_VERSION="{version}"',
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in includes),
            *(f"-isystem{path}" for path in system),
        ]

        def compile_one(source):
            output = scratch / f"{source}.o"
            subprocess.run([*common, "-c", str(HERE / source), "-o", str(output)], check=True)
            return str(output)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(compile_one, SOURCES))
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        subprocess.run(
            [
                *compiler,
                "-shared",
                *objects,
                *("-o", str(target)),
                *libraries,
                *("-ltorch_python", "-ltorch_cpu", "-lc10"),
                str(library),
                "-Wl,-rpath,$ORIGIN",
                "-Wl,--as-needed",
                "-Wl,-s",
            ],
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
    target = package / ("_bridge" + sysconfig.get_config_var("EXT_SUFFIX"))
    target.unlink(missing_ok=True)
    compile_bridge(
        copy, args.include.resolve(), target, version, shlex.split(args.compiler), args.jobs
    )
    write_metadata(args.out.resolve(), version)


if __name__ == "__main__":
    main()
