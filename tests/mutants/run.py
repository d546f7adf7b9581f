"""Runs tests against mutants: small changes of our own code that a test must notice.

All mutants go into one scratch copy, each behind EVENKEEL_MUTANT=<its name>, so that one build serves all, and
processes that a test starts are mutated with it. Each test runs once as the code is, and must pass; then once per
mutant, and must fail. The table is in the .txt files beside this one, a block per mutant:

    mutant: stats_forget_errors
    promise: the statistics have the last error
    in: reducer.cc
    from: completer.counted().last_error = std::string(error.message());
    to: if (!MUTANT) completer.counted().last_error = std::string(error.message());
    test: ReducerStatsTest.ShadowedStepsAndErrorsAreCounted

`from` is found by its text, in whichever file it is, whatever its white space; exactly once, otherwise that is an
error. `in`, the name of a file without its folder, narrows the search. MUTANT is the condition. Lines that begin with
white space continue the one before. `test` is Suite.Name, or Suite.* for a whole suite, and its target is found by
itself; a test whose source is in no target of its own, or in several, is `//its:target Suite.Name`. Several tests, all
of which must fail, are separated by semicolons.
"""

import argparse
import collections
import concurrent.futures
import fnmatch
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SWITCH = """\
#ifndef EVENKEEL_MUTANTS
#define EVENKEEL_MUTANTS
#include <cstdlib>
#include <string_view>
namespace evenkeel_mutants {
inline bool Is(std::string_view name) {
  static const char* const mutant = std::getenv("EVENKEEL_MUTANT");
  return mutant != nullptr && name == mutant;
}
}  // namespace evenkeel_mutants
#endif
#line 1
"""
TEST = re.compile(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", re.MULTILINE)
FIRST_TIER_MIN_KILLED = 0.8
FIELDS = {"mutant", "promise", "in", "from", "to", "test"}


def fail(*problems):
    for problem in problems:
        print("mutants:", problem, file=sys.stderr)
    sys.exit(2)


class Mutant:
    def __init__(self, table, fields):
        self.table, self.name = table, fields.get("mutant", "?")
        missing = FIELDS - {"in"} - set(fields)
        if missing or not re.fullmatch(r"\w+", self.name) or "MUTANT" not in fields.get("to", ""):
            fail(f"{table}: mutant {self.name}: {', '.join(sorted(missing)) or 'its name or `to`'} is missing or wrong")
        self.promise, self.file = fields["promise"], fields.get("in")
        self.before, self.after = fields["from"], fields["to"]
        self.tests = [Test(text.strip()) for text in fields["test"].split(";")]

    def condition(self):
        return f'::evenkeel_mutants::Is("{self.name}")'


class Test:
    def __init__(self, text):
        label, _, self.name = text.rpartition(" ")
        self.label = label.strip() or None  # The target's, once it is known.

    def __str__(self):
        return f"{self.label} {self.name}" if self.label else self.name


def read_tables():
    mutants = []
    for path in sorted(pathlib.Path(__file__).parent.glob("*.txt")):
        text = "\n".join(line for line in path.read_text().split("\n") if not line.startswith("#"))
        for block in re.split(r"\n\s*\n", text):
            fields = {}
            for line in re.sub(r"\n[ \t]+", " ", block).strip().split("\n"):
                key, colon, value = line.partition(":")
                if colon and key in FIELDS and key not in fields:
                    fields[key] = value.strip()
                elif line:
                    fail(f"{path.name}: no field of a mutant: {line}")
            if fields:
                mutants.append(Mutant(path.stem, fields))
    twice = [name for name, times in collections.Counter(m.name for m in mutants).items() if times > 1]
    if twice:
        fail(f"several mutants have the name {', '.join(twice)}")
    return mutants


def repository_files():
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPOSITORY,
                            check=True, stdout=subprocess.PIPE).stdout.decode().split("\0")
    return [path for path in listed if path and (REPOSITORY / path).exists()]


def is_mutated(path):
    return (path.endswith((".cc", ".h")) and not path.startswith(("tests/", "third_party/"))
            and "/testing/" not in path and not path.endswith("_test.cc"))


def without_space(text):
    """The text without white space, and where each of its characters was."""
    places = [i for i, c in enumerate(text) if not c.isspace()]
    return "".join(text[i] for i in places), places


def mutate(mutants, sources):
    """The sources that have mutants, by path; and what is wrong with anchors."""
    packed = {path: without_space(text) for path, text in sources.items()}
    edits, problems = collections.defaultdict(list), []
    for mutant in mutants:
        anchor = without_space(mutant.before)[0]
        found = []
        for path, (text, places) in packed.items():
            if mutant.file and not f"/{path}".endswith(f"/{mutant.file}"):
                continue
            at = text.find(anchor)
            while at >= 0:
                found.append((path, places[at], places[at + len(anchor) - 1] + 1))
                at = text.find(anchor, at + 1)
        if len(found) != 1:
            where = ", ".join(path for path, _, _ in found) or "nowhere"
            problems.append(f"{mutant.table}: mutant {mutant.name}: `from` is there {len(found)} times ({where})")
            continue
        path, begin, end = found[0]
        edits[path].append((begin, end, mutant))
    mutated = {}
    for path, changes in edits.items():
        text = sources[path]
        changes.sort(key=lambda change: change[:2], reverse=True)
        for (begin, _, later), (_, end, earlier) in zip(changes, changes[1:]):
            if end > begin:
                problems.append(f"{path}: mutants {earlier.name} and {later.name} overlap")
        for begin, end, mutant in changes:
            text = text[:begin] + mutant.after.replace("MUTANT", mutant.condition()) + text[end:]
        mutated[path] = SWITCH + text
    return mutated, problems


def sources_of_tests(files):
    """The sources that have a test, by its name, and by Suite.* for all of a suite."""
    sources = collections.defaultdict(set)
    for path in files:
        if path.endswith(".cc"):
            for suite, name in TEST.findall((REPOSITORY / path).read_text(errors="replace")):
                sources[f"{suite}.{name}"].add(path)
                sources[f"{suite}.*"].add(path)
    return sources


def write_if_changed(path, content):
    if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make_copy(scratch, files, mutated):
    """The repository in `scratch`; files that are as they were keep their times, so that little is built again."""
    for path in files:
        target = scratch / path
        content = mutated[path].encode() if path in mutated else (REPOSITORY / path).read_bytes()
        write_if_changed(target, content)
        shutil.copymode(REPOSITORY / path, target)
    listing = scratch / ".mutants_files"
    before = set(listing.read_text().split("\n")) if listing.exists() else set()
    for path in before - set(files) - {""}:
        (scratch / path).unlink(missing_ok=True)
    listing.write_text("\n".join(files))


class Targets:
    """Which target has which test, and its arguments."""

    def __init__(self, bazel, scratch, tests):
        described = subprocess.run([*bazel, "query", "kind('(cc|_variant)_test', //...)", "--output=xml", "--noshow_progress"],
                                   cwd=scratch, stdout=subprocess.PIPE, check=False)
        if not described.stdout:
            fail("bazel query has failed")
        self.of_source, self.arguments, self.tests = collections.defaultdict(list), {}, tests
        self.first_tier, self.program = set(), {}
        for rule in xml.etree.ElementTree.fromstring(described.stdout).iter("rule"):
            lists = {one.get("name"): [each.get("value") for each in one] for one in rule.iter("list")}
            if "gpu" in (lists.get("tags") or []):
                continue
            label = rule.get("name")
            self.arguments[label] = lists.get("args") or []
            self.program[label] = next((one.get("value") for one in rule.iter("label") if one.get("name") == "test"), label)
            if "full" not in (lists.get("tags") or []):
                self.first_tier.add(label)
            for source in lists.get("srcs") or []:
                self.of_source[source.lstrip("/").replace(":", "/", 1).lstrip("/")].append(label)

    def find(self, test):
        """(label, None), or (None, what is wrong)."""
        labels = sorted({label for path in self.tests.get(test, ()) for label in self.of_source[path]})
        if len(labels) == 1:
            return labels[0], None
        return None, f"{test} is in {', '.join(labels) or 'no target'}: name its target"

    def in_first_tier(self, label):
        """Returns the target of the first tier that runs the same program, or None."""
        same = {each for each in self.first_tier if self.program[each] == self.program[label]}
        return label if label in same else min(same, default=None)


def gtest_filter(tests):
    patterns = []
    for test in tests:
        patterns += [test, test + "/*", "*/" + test, "*/" + test + "/*"] if "/" not in test else [test]
    return ":".join(patterns)


class Outcome:
    def __init__(self, code, seconds, out):
        self.code, self.seconds, self.out = code, seconds, out

    def ran(self):
        """How many tests ran to their end without skipping."""
        def number(pattern):
            found = re.search(pattern, self.out, re.MULTILINE)
            return int(found.group(1)) if found else 0
        ran, skipped = number(r"^\[==========\] (\d+) tests? from .* ran\."), number(r"^\[  SKIPPED \] (\d+) tests?")
        return ran - skipped


def run_test(scratch, label, arguments, tests, limit, mutant=None):
    package, name = label[2:].split(":")
    runfiles = scratch / "bazel-bin" / package / f"{name}.runfiles"
    root = next((each.parent for each in runfiles.glob("*/" + package + "/" + name)), None)
    for part in package.split("/"):
        root = root and root.parent
    if root is None:
        fail(f"{label} has no runfiles")
    with tempfile.TemporaryDirectory(prefix="ekm") as temporary:
        environment = {**os.environ, "TEST_TMPDIR": temporary, "TEST_SRCDIR": str(runfiles),
                       "TEST_WORKSPACE": root.name, "RUNFILES_DIR": str(runfiles)}
        environment.pop("EVENKEEL_MUTANT", None)
        over = re.search(r"_over_([a-z_]+)_test$", name)  # backend_tests.bzl: backend_tests().
        environment["EVENKEEL_TEST_BACKEND"] = over.group(1) if over else "local"
        if name.endswith("_of_few_seeds_test"):
            environment["EVENKEEL_TEST_FEW_SEEDS"] = "1"
        environment["EVENKEEL_HOST_PARTS"] = "2" if over and over.group(1) == "hierarchical" else ""
        if mutant:
            environment["EVENKEEL_MUTANT"] = mutant.name
        command = [str(root / package / name), *arguments, f"--gtest_filter={gtest_filter(tests)}"]
        if mutant:
            command.append("--gtest_fail_fast")
        begin = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT,
                                       stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            try:
                os.killpg(process.pid, signal.SIGKILL)  # Whatever it has left.
            except ProcessLookupError:
                pass
            process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
    return Outcome(code, time.monotonic() - begin, text)


def run_unmutated(scratch, targets, tests, options):
    """By label: how long the target takes, and why its tests can't tell anything here, or None."""
    names, found = collections.defaultdict(set), {}
    for test in tests:
        names[test.label].add(test.name)
    def run(label):
        return run_test(scratch, label, targets.arguments[label], sorted(names[label]), options.limit)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for label, outcome in zip(names, pool.map(run, names)):
            what = None
            if outcome.code != 0 or outcome.ran() <= 0:
                what = "skips" if outcome.code == 0 else "has no end" if outcome.code is None else "fails"
                print(f"{label} {what} without a mutant:\n{outcome.out[-4000:]}", flush=True)
            found[label] = (outcome.seconds, what)
    return found


def judge(outcome):
    if outcome.code is None:
        return "killed", "no end"
    if outcome.code == 0:
        return "SURVIVES", "its test does not run" if outcome.ran() <= 0 else "its test passes"
    return "killed", f"signal {-outcome.code}" if outcome.code < 0 else "fails"


def run_mutants(scratch, targets, mutants, unmutated, options):
    """The names of those that survive, and of those of which nothing is known."""
    def run(pair):
        mutant, test = pair
        seconds, useless = unmutated[test.label]
        if useless:
            return None
        limit = min(options.limit, 30 + 3 * seconds)
        return run_test(scratch, test.label, targets.arguments[test.label], [test.name], limit, mutant)
    survivors, unknown = set(), set()
    pairs = [(mutant, test) for mutant in mutants for test in mutant.tests]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for (mutant, test), outcome in zip(pairs, pool.map(run, pairs)):
            if outcome is None:
                unknown.add(mutant.name)
                print(f"UNKNOWN  {mutant.name:45} {unmutated[test.label][1]} without a mutant: {test}", flush=True)
                continue
            verdict, why = judge(outcome)
            print(f"{verdict:8} {mutant.name:45} {outcome.seconds:6.1f} s  {why}: {test}", flush=True)
            if options.output:
                print(outcome.out, flush=True)
            if verdict != "killed":
                survivors.add(mutant.name)
    return survivors, unknown - survivors


def chosen(mutants, patterns):
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for m in mutants for name in (m.name, m.table)):
            fail(f"no mutant, and no table, is called {pattern}")
    return [m for m in mutants
            if not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns for name in (m.name, m.table))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     prog="tests/mutants.sh")
    parser.add_argument("which", nargs="*", help="names of mutants or of tables, with * and ?; all if none")
    parser.add_argument("--list", action="store_true", help="prints the mutants, and looks for their anchors and tests")
    parser.add_argument("--first_tier", action="store_true",
                        help="runs only tests of the first tier; fails if they find less than 80 %% of the mutants")
    parser.add_argument("--output", action="store_true", help="prints what the tests print")
    parser.add_argument("--jobs", type=int, default=1, help="how many tests run at once (1; their time counts)")
    parser.add_argument("--limit", type=float, default=300, help="the most seconds that a test may take")
    parser.add_argument("--scratch", type=pathlib.Path, help="the copy, which stays for the next run",
                        default=pathlib.Path(tempfile.gettempdir()) / "evenkeel_mutants")
    options = parser.parse_args()
    # BAZEL is a command, as in .ci/run; ./bazelw of the copy if there is none.
    bazel = shlex.split(os.environ.get("BAZEL", "./bazelw"))

    all_mutants = read_tables()
    mutants = chosen(all_mutants, options.which)
    files = repository_files()
    sources = {path: (REPOSITORY / path).read_text() for path in files if is_mutated(path)}
    mutated, problems = mutate(all_mutants, sources)
    known = sources_of_tests(files)
    problems += [f"{mutant.table}: mutant {mutant.name}: there is no test {test.name}"
                 for mutant in all_mutants for test in mutant.tests if test.name not in known]
    if problems:
        fail(*problems)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.table}: {mutant.name}: {mutant.promise} ({'; '.join(map(str, mutant.tests))})")
        print(f"ok   the anchors and tests of {len(mutants)} mutants are found")
        return 0

    make_copy(options.scratch, files, mutated)
    targets = Targets(bazel, options.scratch, known)
    tests = [test for mutant in mutants for test in mutant.tests]
    for test in tests:
        if test.label is None:
            test.label, problem = targets.find(test.name)
            problems += [problem] if problem else []
        elif test.label not in targets.arguments:
            problems.append(f"there is no test {test.label}")
    if problems:
        fail(*problems)
    without_test = set()
    if options.first_tier:
        for test in tests:
            test.label = targets.in_first_tier(test.label)
        for mutant in mutants:
            mutant.tests = [test for test in mutant.tests if test.label]
        without_test = {mutant.name for mutant in mutants if not mutant.tests}
        tests = [test for test in tests if test.label]
    labels = sorted({test.label for test in tests})
    build = [*bazel, "build", "--keep_going", "--noshow_progress", *labels]
    if subprocess.run(build, cwd=options.scratch, check=False).returncode:
        fail("the mutants do not compile")

    unmutated = run_unmutated(options.scratch, targets, tests, options)
    survivors, unknown = run_mutants(options.scratch, targets, mutants, unmutated, options)
    survivors |= without_test
    killed = len(mutants) - len(survivors) - len(unknown)
    print(f"{len(mutants)} mutants: {killed} killed ({100 * killed // len(mutants)} %), {len(survivors)} survive, "
          f"{len(unknown)} unknown")
    for name in sorted(survivors | unknown):
        print(f"  {'survives' if name in survivors else 'unknown'}: {name}")
    least = FIRST_TIER_MIN_KILLED if options.first_tier else 1
    return 0 if killed >= least * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
