"""The checks of first_tier.sh."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
LIBRARIES = ["//bucket", "//comm", "//join", "//libtorch", "//zero_optim"]
# A program of a command of the docs; those below tests/ and the benchmarks are for engineers.
COMMAND = re.compile(r"bazelw? (?:run|build) (?:-[^ ]* )*(//(?:trainer|tools|examples|python|join)[a-z0-9_/]*:?[a-z0-9_]*)")


def lists():
    """Returns PROMISES and ENTRY_POINTS; the file's beginning is Python as well."""
    text = (REPOSITORY / "tools/build_defs/first_tier.bzl").read_text()
    names = {}
    exec(text.partition("\n_TESTS = ")[0], names)  # pylint: disable=exec-used
    return names["PROMISES"], names["ENTRY_POINTS"]


def promises_of_docs():
    """Returns the numbers of the list below "Promises"."""
    text = (REPOSITORY / "docs/internals.md").read_text().partition("\n## Promises\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^(\d+)\. ", text, re.MULTILINE))


def programs_of_docs():
    """Returns a page that names it for each program of the docs."""
    listed = subprocess.run(["git", "ls-files", "*.md", ":!CHANGELOG.md"], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    found = {}
    for page in listed.stdout.decode().split():
        for program in COMMAND.findall((REPOSITORY / page).read_text()):
            if not re.search(r":bench_|_benchmark$", program):
                found.setdefault(program.rstrip("/"), page)
    return found


def query(expression):
    bazel = shlex.split(os.environ.get("BAZEL", "./bazelw"))
    answer = subprocess.run([*bazel, "query", "--noshow_progress", "--keep_going=false", expression], cwd=REPOSITORY,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False, text=True)
    if answer.returncode:
        sys.exit(f"FAILED  bazel query works\n{answer.stderr}")
    return set(answer.stdout.split())


# Commands of bazelw, and whether it drops the filter of .bazelrc, which would hide a test that is named.
COMMANDS = {
    "test //...": False,
    "test //bucket/... //comm:work_test": False,
    "test -k //bucket:all": False,
    "test": False,
    "build //bucket:fusion_test": False,
    "run //tools:launch -- test //x:y": False,
    "test //bucket:fusion_test": True,
    "--batch test --config=asan fusion_test --test_arg=x": True,
}


def wrongly_passed_on():
    """Yields the commands that bazelw passes on in another form."""
    with tempfile.TemporaryDirectory() as folder:
        fake = pathlib.Path(folder) / "bazel"
        fake.write_text('#!/bin/sh\n[ "$1" = --version ] || echo "$@"\n')
        fake.chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        for command, drops in COMMANDS.items():
            said = subprocess.run([REPOSITORY / "bazelw", *command.split()], env=environment, check=False, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout.strip()
            expected = command.replace("test ", "test --test_tag_filters= ", 1) if drops else command
            if said != expected:
                yield f'bazelw {command} runs "bazel {said}", expected "bazel {expected}"'


def main():
    promises, entries = lists()
    listed = [test for tests in [*promises.values(), *entries.values()] for test in tests]
    tests = {test for test in listed if test.startswith("//")}
    scripts = {test for test in listed if not test.startswith("//")}
    programs = programs_of_docs()
    documented, ran = promises_of_docs(), query('tests(//...) except attr(tags, "[\\[ ](full|gpu)[,\\]]", tests(//...))')
    ci = (REPOSITORY / ".ci/run").read_text()
    checks = {
        "each promise of docs/internals.md has a test of the first tier":
            [f"promise {number} of docs/internals.md is missing in PROMISES of first_tier.bzl: add it with at least one test"
             for number in documented - set(promises)] +
            [f"PROMISES of first_tier.bzl has promise {number}, but docs/internals.md does not"
             for number in set(promises) - documented] +
            [f"promise {number} has no test in first_tier.bzl" for number, checked_by in promises.items() if not checked_by] +
            (["docs/internals.md lists no promises"] if not documented else []),
        "each program of the docs has a test of the first tier":
            [f"{programs[program]} names {program}: add it with a test to ENTRY_POINTS of first_tier.bzl" for program in programs
             if program not in entries and program.partition(":")[0] not in entries] +
            [f"no page names {entry}: remove it from ENTRY_POINTS of first_tier.bzl" for entry in entries
             if entry not in LIBRARIES and not any(f"{program}:".startswith(f"{entry}:") for program in programs)] +
            [f"{library} is missing in ENTRY_POINTS of first_tier.bzl" for library in LIBRARIES if library not in entries] +
            [f"{program} has no test in first_tier.bzl" for program, checked_by in entries.items() if not checked_by] +
            (["the docs name no programs"] if not programs else []),
        "the tests of the first tier exist, and bazel test //... runs these":
            [f"{test} is in first_tier.bzl, but bazel test //... does not run it: it does not exist, or has the tag full or gpu"
             for test in tests - ran] +
            [f"bazel test //... runs {test}, but first_tier.bzl does not list it: list it, or give it the tag full"
             for test in ran - tests],
        "the scripts among them exist, and .ci/run calls them":
            [f"{script} is not executable" for script in scripts if not os.access(REPOSITORY / script, os.X_OK)] +
            [f"{script} is not called by .ci/run" for script in scripts
             if not re.search(rf"^(?:promises )?{re.escape(script)}(?: >.* &)?$", ci, re.MULTILINE)],
        "bazelw drops the first tier's filter where tests are named": list(wrongly_passed_on()),
    }
    for sentence, problems in checks.items():
        print(f"{'FAILED ' if problems else 'ok     '} {sentence}")
        for problem in sorted(problems):
            print(f"        {problem}")
    return 1 if any(checks.values()) else 0


sys.exit(main())
