#!/usr/bin/env python3
"""Writes what a build with CMake alone needs beside the sources of this commit.

    tools/cmake/write_sources.py --to=FOLDER

FOLDER gets CMakeLists.txt, sources.cmake (which sources make which library and program, with which
options), libraries.json.in (the files that evenkeel-install installs) and generated/. All of it is
read from the commands that Bazel would run, without CUDA. Part of tools/release.sh.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from aquery import ROOT, actions_of, argument_after  # pylint: disable=wrong-import-position

LIBRARIES = "//tools/installation:libraries"
SHARED = "//join/abi:evenkeel"
# "install" copies the others into a prefix.
PROGRAMS = ("flight", "launch", "top", "install")
ROOTS = " + ".join([LIBRARIES, SHARED, *(f"//tools:{name}" for name in PROGRAMS)])


def bazel(*words):
    """Returns the lines that Bazel prints."""
    command = [*shlex.split(os.environ.get("BAZEL", "./bazelw")), words[0], "--noshow_progress", *words[1:]]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def libraries_of(link):
    """Returns the system's libraries that a link names, without Abseil's, which CMake finds."""
    words = [re.sub("^external/(?!com_google_absl/).*/(lib.*[.]a)$", r"-l:\1", word) for word in link["arguments"]]
    return list(dict.fromkeys(word for word in words if re.match("-l(?!absl_|stdc|m$)", word)))


def abseil_target(label):
    """Returns absl::status of @com_google_absl//absl/status:status."""
    folder, name = re.fullmatch(r"@com_google_absl//absl/(\w+):(\w+)", label).groups()
    return f"absl::{folder}_{name}" if (folder, name) == ("algorithm", "container") else f"absl::{name}"


class Compilations:
    """The objects that Bazel compiles."""

    def __init__(self, actions, out):
        self.out = out
        self.arguments = {
            argument_after(action["arguments"], "-o"): action["arguments"]
            for action in actions
            if action["mnemonic"] == "CppCompile" and "-c" in action["arguments"]
        }
        self.common = set.intersection(*(set(arguments) for arguments in self.arguments.values()))
        # Options of some sources alone, and whether these begin with the prelude: sources with both.
        self.special = {}

    def objects_of(self, link):
        """Yields the objects that a link names, and those in the archives that it names."""
        for word in link["arguments"]:
            archive = re.fullmatch(r"(bazel-out/.*)/lib([^/]*)\.(?:a|lo)", word)
            folder = f"{archive[1]}/_objs/{archive[2]}/" if archive else None
            if folder:
                yield from (output for output in self.arguments if output.startswith(folder))
            elif word in self.arguments:
                yield word

    def source_of(self, output):
        """Returns the path of an object's source in FOLDER, where a generated one is copied to."""
        arguments = self.arguments[output]
        source = argument_after(arguments, "-c")
        generated = re.match("bazel-out/[^/]+/bin/", source)
        if generated:
            path = self.out / "generated/evenkeel" / source[generated.end():]
            path.parent.mkdir(parents=True, exist_ok=True)
            for suffix in (".cc", ".h"):
                shutil.copyfile((ROOT / source).with_suffix(suffix), path.with_suffix(suffix))
            source = str(path.relative_to(self.out))
        options = tuple(
            word for word in arguments if re.match("-(O|f(?!random-seed=)|m|D)", word) and word not in self.common
        )
        if options or "-include" not in arguments:
            self.special.setdefault((options, "-include" in arguments), set()).add(source)
        return source

    def sources_of(self, link, others=()):
        """Returns the sources of what is linked, without those of `others`."""
        sources = dict.fromkeys(self.source_of(output) for output in self.objects_of(link))
        return [source for source in sources if source not in others]


def write_sources(description, out):
    """Writes sources.cmake."""
    actions = actions_of(f'mnemonic("CppCompile|CppLink|Archive|SharedLibrary", deps({ROOTS}))')
    compiled = Compilations(actions, out)
    lines = ["# Written by tools/cmake/write_sources.py."]

    def define(name, values):
        lines.append("\n  ".join([f"set(evenkeel_{name}", *values]) + ")")

    def link_of(mnemonic, file):
        return next(
            action for action in actions
            if action["mnemonic"] == mnemonic and any(word.endswith("/" + file) for word in action["arguments"])
        )

    parts = {archive["part"]: pathlib.Path(archive["file"]).name for archive in description["archives"]}
    define("PARTS", parts)
    in_parts = set()
    for part, file in parts.items():
        sources = compiled.sources_of(link_of("Archive", file))
        define(f"{part}_SOURCES", sources)
        in_parts.update(sources)
    links = {name: link_of("CppLink", f"tools/{name}") for name in PROGRAMS}
    links["abi"] = link_of("SharedLibrary", "libevenkeel.so")
    define("PROGRAMS", PROGRAMS)
    for name, link in links.items():
        define(f"{name}_SOURCES", compiled.sources_of(link, in_parts))
        define(f"{name}_LIBRARIES", libraries_of(link))

    labels = bazel("query", f"deps(labels(deps, {ROOTS})) intersect @com_google_absl//absl/...:*")
    define("ABSEIL", sorted(abseil_target(label) for label in labels if not label.endswith(":BUILD")))
    define("WARNINGS", sorted(word for word in compiled.common if re.match("-W(?!error|no-error)", word)))
    for (options, has_prelude), sources in sorted(compiled.special.items()):
        lines.append("\n  ".join([
            "set_source_files_properties(",
            *sorted(sources),
            f'PROPERTIES COMPILE_OPTIONS "{";".join(options)}" SKIP_PRECOMPILE_HEADERS {"OFF" if has_prelude else "ON"})',
        ]))
    (out / "sources.cmake").write_text("\n".join(lines) + "\n")


def write_libraries(description, out):
    """Writes the list that evenkeel-install reads, with paths in the folder of CMake's build."""
    headers = [header["include"] for header in description["headers"]]
    labels = bazel("query", f"labels(hdrs, labels(deps, {SHARED}))")
    of_shared = [label.removeprefix("//").replace(":", "/") for label in labels]
    exported = [f"evenkeel/{path}" for path in of_shared if "EVENKEEL_EXPORT" in (ROOT / path).read_text()]
    text = json.dumps({
        "archives": [
            {"part": archive["part"], "file": pathlib.Path(archive["file"]).name} for archive in description["archives"]
        ],
        "programs": [f"programs/{name}" for name in PROGRAMS if name != "install"],
        "headers": [{"include": header, "file": f"include/{header}"} for header in headers + exported],
        "public_headers": description["public_headers"] + exported,
        "abseil": ["@evenkeel_ABSEIL_ARCHIVES@"],
        "link_flags": description["link_flags"],
    }, indent=1)
    (out / "libraries.json.in").write_text(text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--to", type=pathlib.Path, required=True, metavar="FOLDER")
    out = parser.parse_args().to.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_HOME"] = "/nonexistent"
    bazel("build", LIBRARIES)
    description = json.loads((ROOT / "bazel-bin/tools/installation/libraries.json").read_text())
    write_sources(description, out)
    write_libraries(description, out)
    shutil.copyfile(ROOT / "tools/cmake/CMakeLists.txt", out / "CMakeLists.txt")


if __name__ == "__main__":
    main()
