"""The installed wheel: which torch it fits, and which system."""

import importlib.metadata
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
import unittest

from groups import VERSION  # Before torch: it unsets EVENKEEL_REPLACE_GLOO.

import torch
from pip._vendor.packaging.specifiers import SpecifierSet

import evenkeel_c10d
from evenkeel_c10d._torches import bridge_for, described

PACKAGE = pathlib.Path(evenkeel_c10d.__file__).parent
SOURCES = pathlib.Path(__file__).resolve().parent.parent
# The highest versions of symbols in the oldest systems with a glibc. Those of systems with a newer
# one are not listed: a wheel that is built there gets a newer tag.
LIBSTDCXX = {(2, 34): {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}}


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


class WheelTest(unittest.TestCase):
    def test_releases_of_a_minor_version_share_a_bridge(self):
        self.assertEqual(bridge_for("2.15.0"), "_bridge_2_15")
        self.assertEqual(bridge_for("2.15.3+cpu"), "_bridge_2_15")
        self.assertEqual(bridge_for("2.15.0.post300"), "_bridge_2_15")
        self.assertEqual(bridge_for("2.15.0a0+git1b"), "_bridge_2_15_0a0_git1b")
        self.assertEqual(bridge_for("2.16.0.dev20270101+cpu"), "_bridge_2_16_0_dev20270101_cpu")

    def test_a_bridge_is_described_by_its_file(self):
        name = "_bridge_2_11.cpython-310-x86_64-linux-gnu.so"
        self.assertEqual(described(name), "torch 2.11 with Python 3.10")
        self.assertEqual(described(name.replace("310", "313t")), "torch 2.11 with Python 3.13t")

    def test_another_torch_is_refused_with_a_sentence(self):
        for version in ("2.10.0", "2.99.0", "2.15.0a0+git1b"):
            ended = run(f"import torch; torch.__version__ = {version!r}; import evenkeel_c10d")
            python = f"{sys.version_info.major}.{sys.version_info.minor}"
            minor = ".".join(torch.__version__.split(".")[:2])
            last = ended.stderr.splitlines()[-1]
            begin = f"ImportError: evenkeel_c10d has no bridge for torch {version} with"
            self.assertTrue(last.startswith(begin), last)
            self.assertIn(f"torch {minor} with Python {python}", last)

    def test_the_metadata_names_the_torches_that_have_a_bridge(self):
        (required,) = importlib.metadata.requires("evenkeel-c10d")
        allowed = SpecifierSet(required.removeprefix("torch"))
        for minor in range(30):
            has_bridge = any(PACKAGE.glob(f"_bridge_2_{minor}.*"))
            self.assertEqual(allowed.contains(f"2.{minor}.1"), has_bridge, f"2.{minor}: {required}")

    def test_the_metadata_of_any_bridges(self):
        wheel = runpy.run_path(str(SOURCES / "wheel.py"))

        def required(*bridges):
            with tempfile.TemporaryDirectory() as tree:
                package = pathlib.Path(tree) / "evenkeel_c10d"
                package.mkdir()
                for bridge in bridges:
                    (package / f"{bridge}.cpython-311-x86_64-linux-gnu.so").touch()
                return wheel["required_torch"](pathlib.Path(tree))

        between = bridge_for("2.12.0a0+git1b")
        self.assertEqual(required("_bridge_2_9", "_bridge_2_11"), "torch>=2.9,<2.12,!=2.10.*")
        self.assertEqual(required("_bridge_2_11", between), "torch>=2.11,<2.13")
        for version in ("2.12.0a0+git1b", "2.12.0rc1", "2.12.0.dev20270101+cpu"):
            text = required(bridge_for(version))
            allowed = SpecifierSet(text.removeprefix("torch"))
            self.assertTrue(allowed.contains(version, prereleases=True), text)
            self.assertFalse(allowed.contains("2.11.0", prereleases=True), text)
        with self.assertRaisesRegex(SystemExit, "torch 2, and one for torch 3"):
            required("_bridge_2_11", "_bridge_3_0")

    def test_torch_finds_the_entry_point(self):
        begin = "import torch.distributed as dist; "
        make = "dist.init_process_group('evenkeel', store=dist.HashStore(), rank=0, world_size=1)"
        imported = run(f"{begin}import evenkeel_c10d; {make}")
        self.assertEqual(imported.returncode, 0, imported.stderr)
        alone = run(begin + make)
        self.assertEqual(alone.returncode == 0, VERSION >= (2, 14), alone.stderr)

    def test_no_file_needs_a_newer_system_than_the_tag_names(self):
        wheel = importlib.metadata.distribution("evenkeel-c10d").read_text("WHEEL")
        glibc = tuple(map(int, re.search(r"^Tag: .*\bmanylinux_(\d+)_(\d+)_", wheel, re.M).groups()))
        allowed = {"GLIBC": glibc, **LIBSTDCXX.get(glibc, {})}
        files = [path for path in PACKAGE.parent.glob("evenkeel_c10d*/*.so*") if path.is_file()]
        self.assertGreaterEqual(len(files), 3)
        for path in files:
            command = ["readelf", "--version-info", "--wide", path]
            needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for library, highest in allowed.items():
                for version in re.findall(rf"Name: {library}_([0-9.]+)\b", needed):
                    numbers = tuple(int(number) for number in version.split("."))
                    self.assertLessEqual(numbers, highest, f"{path.name}: {library} {version}")


if __name__ == "__main__":
    unittest.main()
