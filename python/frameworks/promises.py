"""Checks and measures the programs of this folder over evenkeel, beside Gloo.

    python promises.py NAME...          e.g. lightning, or lightning:trains; without a name: all

Prints "ok ..." or "FAILED ..." for each promise, and figures for docs/frameworks.md.
"""

import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "upstream"))
from patched import patched  # noqa: E402

# How a program gets evenkeel: by its name, or in the place of gloo.
NAME, REPLACED = ["--backend", "evenkeel"], []
HOW = {
    "torchrun": NAME,
    "lightning": NAME,
    "accelerate": REPLACED,
    "transformers": REPLACED,
    "ignite": REPLACED,
    "ray": NAME,
    "deepspeed": NAME,
    "torchft": NAME,
    "skorch": NAME,
}
# The patches of ../upstream that make a released package accept the name.
PATCHES = {
    "accelerate": ["accelerate"],
    "transformers": ["accelerate", "transformers"],
    "ignite": ["ignite"],
}
# Programs that have no uneven inputs, and those that start their own ranks.
NO_JOIN = {"transformers", "deepspeed", "torchft"}
ONE_PROCESS = {"ray"}
TIMEOUT_S = 300


class Failed(Exception):
    pass


def run(name, folder, backend, *options, may_fail=False, packages=None):
    """Runs a program as two ranks, each started by itself, as on two hosts.

    Returns their exit codes, and the text that each printed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment.pop("EVENKEEL_REPLACE_GLOO", None)
    environment["RAY_AUTH_MODE"] = "disabled"  # Ray would write a token to the home folder.
    options = list(map(str, options))
    if packages is not None:  # Patched ones, which accept the name.
        paths = [str(packages), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if backend == "evenkeel" and (packages is not None or HOW[name] is NAME):
        options += NAME
    elif backend == "evenkeel":
        environment["EVENKEEL_REPLACE_GLOO"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    commands, environments = [], []
    for rank in range(1 if name in ONE_PROCESS else 2):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0"}
        hosts = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
        environments.append(environment if name in ONE_PROCESS else environment | ranks | hosts)
        commands.append([sys.executable, HERE / f"train_{name}.py", folder, *options])
    return _end(commands, environments, may_fail)


def _end(commands, environments, may_fail=False):
    """Runs commands at once; at the timeout it kills them and the processes that they started."""
    processes, logs = [], []
    try:
        for command, environment in zip(commands, environments):
            logs.append(tempfile.TemporaryFile("w+"))
            out = {"stdout": logs[-1], "stderr": logs[-1], "start_new_session": True}
            processes.append(subprocess.Popen(command, env=environment, **out))
        end = time.time() + TIMEOUT_S
        codes = [process.wait(max(0, end - time.time())) for process in processes]
        in_time = True
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    texts = []
    for log in logs:
        log.seek(0)
        texts.append(log.read())
    ends = "\n".join(line[:200] for text in texts for line in text.splitlines()[-25:])
    words = " ".join(map(str, commands[0][1:]))
    if not in_time:
        raise Failed(f"{words}: no end within {TIMEOUT_S} s\n{ends}")
    if not may_fail and any(codes):
        raise Failed(f"{words}: exit codes {codes}\n{ends}")
    return codes, texts


def weights(folder):
    """Returns the weights of both ranks, which are equal."""
    first, second = (torch.load(folder / f"weights{rank}.pt") for rank in (0, 1))
    _compare(first, second, "rank 0 and rank 1")
    return first


def _compare(first, second, what):
    if first.keys() != second.keys():
        raise Failed(f"{what} have different parameters")
    unequal = [key for key in first if not torch.equal(first[key], second[key])]
    if unequal:
        gap = max((first[key] - second[key]).abs().max().item() for key in unequal)
        raise Failed(f"{what} differ in {unequal} by {gap:.3g}")


def trains(name, folder):
    for backend in ("gloo", "evenkeel"):
        run(name, folder / backend, backend)
    _compare(weights(folder / "gloo"), weights(folder / "evenkeel"), "Gloo and evenkeel")


def takes_the_name(name, folder):
    """Compares a run with patched packages and without EVENKEEL_REPLACE_GLOO with Gloo's."""
    packages = folder / "packages"
    packages.mkdir()
    for patch in PATCHES[name]:
        patched(HERE.parent / "upstream" / f"{patch}.patch", packages)
    _, texts = run(name, folder / "released", "evenkeel", may_fail=True, packages=folder / "none")
    released = [folder / f"released/weights{rank}.pt" for rank in (0, 1)]
    if all(path.exists() for path in released):
        first, second = map(torch.load, released)
        if all(torch.equal(first[key], second[key]) for key in first):
            raise Failed("the released package trains by the name evenkeel, too: drop the patch")
        refusal = "the ranks train apart"
    else:
        refusal = _short(next((s for s in texts[0].splitlines() if "Error: " in s), "no error"))
    if not (folder / "gloo").exists():
        run(name, folder / "gloo", "gloo")
    run(name, folder / "patched", "evenkeel", packages=packages)
    _compare(weights(folder / "gloo"), weights(folder / "patched"), "Gloo and evenkeel")
    return f"without the patch: {refusal}"


def resumes(name, folder):
    """Compares with a run that is not interrupted; Lightning's counters depend on the callback."""
    if name != "lightning":
        _resumes(name, folder, "evenkeel")
        return
    _resumes(name, folder, "uneven_evenkeel", "--uneven")
    _resumes(name, folder, "unsized_evenkeel", "--uneven", "--unsized")


def _resumes(name, folder, whole, *options):
    if not (folder / whole).exists():
        run(name, folder / whole, "evenkeel", *options)
    resumed = folder / f"resumed_{whole}"
    run(name, resumed, "evenkeel", "--epochs", 1, *options)
    run(name, resumed, "evenkeel", "--resume", *options)
    _compare(weights(folder / whole), weights(resumed), f"one run and a resumed one {options}")
    for rank in (0, 1):  # The metrics and counters of Lightning.
        one, two = (_read(path / f"figures{rank}.json") for path in (folder / whole, resumed))
        if one != two:
            raise Failed(f"{options}: rank {rank} has {two} after a resumed run, {one} after one run")


def _read(path):
    return json.loads(path.read_text())


def stops(name, folder):
    """Ends the training before that of an epoch: there is no validation."""
    run(name, folder / "stopped", "evenkeel", "--uneven", "--steps", 3)
    for rank in (0, 1):
        figures = _read(folder / f"stopped/figures{rank}.json")
        if figures["steps"] != 3 or "validation" in figures:
            raise Failed(f"rank {rank} of a run with max_steps=3 has {figures}")


def refuses(name, folder):
    """Lightning takes the integer 1 as after each batch, and 1.0 as after each epoch."""
    import lightning
    from evenkeel_c10d.lightning import JoinCallback

    for interval in (1, 2, 0.5):
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, val_check_interval=interval, default_root_dir=folder
        )
        try:
            JoinCallback().setup(trainer, lightning.LightningModule(), "fit")
        except ValueError:
            continue
        raise Failed(f"val_check_interval={interval} is accepted")


def joins(name, folder):
    for backend in ("gloo", "evenkeel"):
        run(name, folder / f"uneven_{backend}", backend, "--uneven")
    both = [weights(folder / f"uneven_{backend}") for backend in ("gloo", "evenkeel")]
    _compare(*both, "Gloo and evenkeel")
    steps = [_read(folder / f"uneven_evenkeel/steps{rank}.json") for rank in (0, 1)]
    if len(steps[0]) == len(steps[1]):
        raise Failed(f"both ranks made {len(steps[0])} steps: the inputs are even")


def counts_as_one(name, folder):
    """Compares weights and metrics of uneven inputs with those of one process."""
    if not (folder / "uneven_evenkeel").exists():
        run(name, folder / "uneven_evenkeel", "evenkeel", "--uneven")
    command = [sys.executable, HERE / "one_process.py", folder / "one", "--uneven"]
    _end([command], [dict(os.environ)])
    one = torch.load(folder / "one/weights0.pt")
    for key, value in weights(folder / "uneven_evenkeel").items():
        # Adam divides by small gradients, and the sums are rounded in another order.
        torch.testing.assert_close(value, one[key], rtol=1e-3, atol=1e-5)
    for rank in (0, 1):
        expected = _read(folder / f"one/figures{rank}.json")
        figures = _read(folder / f"uneven_evenkeel/figures{rank}.json")
        for key, value in expected.items():
            if abs(figures[key] - value) > 1e-4 * abs(value):
                raise Failed(f"rank {rank}: {key} is {figures[key]}, in one process {value}")


def goes_on(name, folder):
    """Compares with a run in which no rank is lost: the survivor makes as many steps."""
    figures = []
    for backend in ("gloo", "evenkeel"):
        if not (folder / backend).exists():
            run(name, folder / backend, backend)
        expected = len(_read(folder / f"{backend}/steps0.json"))
        lost = folder / f"lost_{backend}"
        codes, texts = run(name, lost, backend, "--lose", 5, may_fail=True)
        if not (lost / "killed").exists() or codes != [0, -signal.SIGKILL]:
            raise Failed(f"{backend}: exit codes {codes}\n{texts[0][-1500:]}")
        ends = _read(lost / "steps0.json")
        if len(ends) != expected:
            raise Failed(f"{backend}: {len(ends)} steps, without a loss {expected}")
        figures.append(f"{backend} after {max(b - a for a, b in zip(ends, ends[1:])):.2f} s")
    return "; ".join(figures)


def restarts(name, folder):
    """Kills rank 1 in the second epoch; the ranks start again and resume."""
    if name in ONE_PROCESS:
        run(name, folder / "restarted", "evenkeel", "--lose", 10)
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node=2", "--max-restarts=1", HERE / f"train_{name}.py"]
        command = [*launcher, folder / "restarted", *NAME, "--lose=10", "--resume"]
        _end([command], [dict(os.environ)])
    if not (folder / "restarted/killed").exists():
        raise Failed("no rank was killed")
    if not (folder / "evenkeel").exists():
        run(name, folder / "evenkeel", "evenkeel")
    one, two = weights(folder / "evenkeel"), weights(folder / "restarted")
    _compare(one, two, "one run and a restarted one")


def names_the_lost(name, folder):
    figures = []
    for backend in ("gloo", "evenkeel"):
        _, texts = run(name, folder / f"lost_{backend}", backend, "--lose", 5, may_fail=True)
        killed = float((folder / f"lost_{backend}/killed").read_text())
        report = folder / f"lost_{backend}/error0"
        if not report.exists():
            raise Failed(f"{backend}: rank 0 reported no exception\n{texts[0][-1500:]}")
        when, error = report.read_text().split("\n", 1)
        figures.append(f"{backend} {float(when) - killed:.2f} s: {_short(error)}")
    if not re.search(r"rank 1\b", error, re.IGNORECASE):
        raise Failed(f"the error does not name rank 1: {error[:500]}")
    return "; ".join(figures)


def _short(error):
    return re.sub(r"\s+", " ", error).strip()[:160]


def steps(name, folder):
    """Returns the medians of the times of a step, of three interleaved runs each."""
    times = {"gloo": [], "evenkeel": []}
    for turn in range(3):
        for backend, medians in times.items():
            own = folder / f"steps_{backend}{turn}"  # Ray continues a run that it finds.
            run(name, own, backend, "--epochs", 25)
            ends = _read(own / "steps0.json")
            medians.append(1e3 * statistics.median(b - a for a, b in zip(ends, ends[1:])))
    return "; ".join(
        f"{backend} {statistics.median(medians):.2f} ms ({min(medians):.2f} to {max(medians):.2f})"
        for backend, medians in times.items()
    )


PROMISES = {
    "trains, weights equal to those with Gloo bit for bit": trains,
    "resumes from its checkpoint, weights equal to those of one run": resumes,
    "joins uneven inputs, weights of both ranks and with Gloo equal": joins,
    "uneven inputs count as in one process: weights, steps, metrics": counts_as_one,
    "an epoch that max_steps ends is not validated": stops,
    "JoinCallback refuses validation within an epoch": refuses,
    "a killed rank is named": names_the_lost,
    "the others go on without a killed rank": goes_on,
    "the ranks start again and resume when one is killed, weights equal": restarts,
    "accepts the name with the patch of python/upstream, weights equal": takes_the_name,
    "the time of a step": steps,
}


def _is_made(name, promise):
    """Returns whether a framework makes this promise."""
    only_of = {
        joins: HOW.keys() - NO_JOIN,
        counts_as_one: {"lightning"},
        stops: {"lightning"},
        refuses: {"lightning"},
        goes_on: {"torchft"},
        restarts: {"torchrun", "ray"},
        resumes: HOW.keys() - ONE_PROCESS,
        names_the_lost: HOW.keys() - {"torchft"} - ONE_PROCESS,
        takes_the_name: PATCHES.keys(),
    }
    return name in only_of.get(promise, HOW.keys())


def main():
    names = sys.argv[1:] or list(HOW)
    failed = False
    for name in names:
        name, _, only = name.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            for text, promise in PROMISES.items():
                if only not in ("", promise.__name__) or not _is_made(name, promise):
                    continue
                try:
                    figures = promise(name, pathlib.Path(folder))
                    print(f"ok      {name}: {text}{f': {figures}' if figures else ''}", flush=True)
                except Exception as error:  # The other promises are checked all the same.
                    failed = True
                    kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
                    print(f"FAILED  {name}: {text}\n        {kind}{error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
