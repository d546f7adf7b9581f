"""Runs PyTorch's own tests of torch.distributed over evenkeel.

    python pytorch_tests.py --world=3                     # over evenkeel
    python pytorch_tests.py --world=3 --backend=gloo      # the reference
    python pytorch_tests.py --only=test_all_gather --logs=/tmp/logs

The tests are those of torch/testing/_internal/distributed/distributed_test.py from the wheel, in
the form that PyTorch runs for Gloo, with evenkeel_c10d.replace_gloo(). Profiler ranges have the name
evenkeel. Nothing else is changed.

pytorch_tests_skipped.txt lists the exceptions, one line each: `name: reason`. An exception runs
too and counts as skipped; if it passes, the run fails, so that the list stays true. The exit code
is 0 if each test passes that PyTorch does not skip and that is no exception.
"""

import argparse
import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile
import time

GLOO, EVENKEEL = "gloo", "evenkeel"
DEADLINE_S = 60
# How long a test may run on after it has failed on one rank.
GRACE_S = 3
EXCEPTIONS = pathlib.Path(__file__).with_name("pytorch_tests_skipped.txt")

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, default=3, help="ranks of each test")
    parser.add_argument("--backend", choices=(EVENKEEL, GLOO), default=EVENKEEL)
    parser.add_argument("--only", default="", help="names of tests, separated by commas")
    parser.add_argument("--logs", type=pathlib.Path, help="folder that keeps what the ranks print")
    return parser.parse_args()


def load_tests(backend, world):
    """Returns PyTorch's test module, its test case and {exit code of a skip: reason}."""
    # The module reads these when it is imported, and its decorators skip by them.
    os.environ.update(BACKEND=GLOO, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ["INIT_METHOD"] = "file://"
    os.environ.pop("EVENKEEL_REPLACE_GLOO", None)  # Import torch reads it.
    import evenkeel_c10d
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal.distributed import distributed_test as tests

    helper = tests.dist.distributed_c10d._new_process_group_helper
    assert not hasattr(helper, "replaces_gloo"), "the reference would be evenkeel"
    if backend == EVENKEEL:
        evenkeel_c10d.replace_gloo()
        find = tests.get_profiling_event

        def find_ours(name, *args, **kwargs):
            events = find(name.replace("gloo:", "evenkeel:"), *args, **kwargs)
            for event in events:
                event.name = event.name.replace("evenkeel:", "gloo:")
            return events

        tests.get_profiling_event = find_ours
    case = type("Case", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})
    return tests, case, {
        skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()
    }


def run_rank(tests, case, rank, name, folder, pipe):
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TEMP_DIR"] = str(folder)
    tests.INIT_METHOD = f"file://{folder}/init"
    case._run(rank, name, str(folder / "store"), pipe)


def run_test(tests, case, name, world, skips, folder):
    """Returns the outcome and a detail of it."""
    method = getattr(case, name)
    if getattr(method, "__unittest_skip__", False):
        return SKIPPED, method.__unittest_skip_why__
    for part in ("barrier", "test_dir"):
        (folder / part).mkdir()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(world)]
    ranks = [
        context.Process(target=run_rank, args=(tests, case, rank, name, folder, pipes[rank][1]))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    codes = [process.exitcode for process in ranks]
    reasons = [skips[code] for code in codes if code in skips]
    if len(reasons) + codes.count(0) < world:
        return FAILED, f"exit codes {codes}" + (f", ranks {hung} were killed" if hung else "")
    return (SKIPPED, reasons[0]) if reasons else (PASSED, "")


def read_exceptions():
    lines = EXCEPTIONS.read_text().splitlines()
    pairs = [line.split(": ", 1) for line in lines if line and not line.startswith("#")]
    return dict(pairs)


def main():
    args = arguments()
    tests, case, skips = load_tests(args.backend, args.world)
    names = sorted(name for name in dir(case) if name.startswith("test_"))
    exceptions = read_exceptions() if args.backend == EVENKEEL else {}
    complaints = [
        f"{name} is listed as an exception and does not exist"
        for name in exceptions
        if name not in names
    ]
    counts = dict.fromkeys((PASSED, FAILED, SKIPPED), 0)
    for name in [name for name in args.only.split(",") if name] or names:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="pytorch_test"))
        begin = time.monotonic()
        outcome, detail = run_test(tests, case, name, args.world, skips, folder)
        if args.logs and outcome != SKIPPED:
            shutil.copytree(folder, args.logs / name, dirs_exist_ok=True)
        if name in exceptions:
            if outcome == PASSED:
                complaints.append(f"{name} has passed and is listed as an exception")
            detail = f"(exception, has {outcome}) {exceptions[name]}"
            outcome = SKIPPED
        elif outcome == FAILED:
            complaints.append(f"{name} has failed")
            for log in sorted(folder.glob("rank*.log")) if not args.logs else ():
                print(f"---- {log.name}", log.read_text(errors="replace")[-3000:], sep="\n")
        counts[outcome] += 1
        print(f"{outcome} {name} {time.monotonic() - begin:.1f} s {detail}".rstrip(), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    for complaint in complaints:
        print(complaint)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
