"""Counts how often watch() finds the slow rank of a module trained over Gloo, and its phase.

    python watch_trials.py --trials=100 --seed=1
    python watch_trials.py --trial=17             # one of them again
    python watch_trials.py --clean-steps=20000    # no delay: no rank may be accused

The counterpart of tests/stragglers, with its delays: of one rank, 5 to 50 % of a step (as measured
before the delay begins). Forward and backward sleep, or compute where the core is slow. The last
500 steps are judged. Exits with 1 if less than 99 % of the ranks, or 95 % of the known phases, are
found, or if another rank is accused in more than 1 % of the trials or in any clean step.
"""

import argparse
import collections
import functools
import mmap
import os
import random
import subprocess
import sys
import time

from groups import run_ranks  # Before torch: it unsets EVENKEEL_REPLACE_GLOO.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenkeel_c10d

WORK = {"forward": 0.008, "backward": 0.012}  # Seconds, in trials.
CLEAN_WORK = {"forward": 0.002, "backward": 0.003}
CALIBRATION, STEPS, BLOCK = 40, 540, 25
PHASES = {
    "input": "input",
    "outside": "outside",
    "forward": "forward",
    "backward": "backward",
    "page faults": "forward",
    "saving": "saving",
    "neighbour": None,  # Shared by forward and backward.
}
NEIGHBOUR = """
import os, time, sys
parent = os.getppid()
next, period = time.monotonic(), 0.001 * (1 + 1 / float(sys.argv[1]))
while os.getppid() == parent:
    time.sleep(max(0, next - time.monotonic()))
    next += period
    end = time.process_time() + 0.001
    while time.process_time() < end: pass
"""

Trial = collections.namedtuple("Trial", "kind world slow fraction every")


def draw(seed, index, worlds):
    generator = random.Random(f"{seed}/{index}")
    kind = generator.choice(list(PHASES))
    world = min(generator.choice(worlds), os.cpu_count() if kind == "neighbour" else 1 << 30)
    slow, fraction = generator.randrange(world), generator.uniform(0.05, 0.5)
    return Trial(kind, world, slow, fraction, generator.randint(10, 30))


def touch_pages(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with mmap.mmap(-1, 1 << 18) as memory:
            for page in range(0, 1 << 18, mmap.PAGESIZE):
                memory[page] = 1


def work(seconds, computes):
    if not computes:
        return time.sleep(seconds)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Net(nn.Sequential):
    def __init__(self, computes, seconds):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.computes, self.seconds = computes, seconds

    def forward(self, inputs):
        work(self.seconds["forward"], self.computes)
        hidden = self[0](inputs)
        hidden.register_hook(lambda _gradient: work(self.seconds["backward"], self.computes))
        return self[2](self[1](hidden))


def job_of(trial, steps, rank, world):
    """Trains, and returns the stragglers of the last 500 steps, and all ranks ever accused."""
    computes = trial.kind in ("neighbour", "none")
    if trial.kind == "neighbour":
        os.sched_setaffinity(0, {rank})
    ddp = DistributedDataParallel(Net(computes, CLEAN_WORK if trial.kind == "none" else WORK))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
    delay = 0.0  # Seconds in each step.
    ever, neighbour = set(), None

    def delay_in(kind, times=1):
        if delay and kind == trial.kind:
            (touch_pages if kind == "page faults" else time.sleep)(times * delay)

    def load():
        for _ in range(CALIBRATION + steps):
            delay_in("input")
            yield torch.ones(16, 64)

    for step, batch in enumerate(job.input(load())):
        if step == CALIBRATION // 2:
            began = time.monotonic()
        if step == CALIBRATION and rank == trial.slow and trial.kind != "none":
            delay = trial.fraction * (time.monotonic() - began) / (CALIBRATION - CALIBRATION // 2)
        if delay and trial.kind == "neighbour" and neighbour is None:
            share = delay / sum(WORK.values())
            neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(share)])
        delay_in("outside")
        optimizer.zero_grad()
        outputs = ddp(batch)
        delay_in("forward")
        delay_in("page faults")
        outputs.register_hook(lambda _gradient: delay_in("backward"))
        outputs.pow(2).mean().backward()
        optimizer.step()
        if step % trial.every == 0:
            with job.phase("saving"):
                delay_in("saving", trial.every)
        if step % BLOCK == 0:
            ever |= {slow for slow, _cost, _phase in job.stragglers()}
    time.sleep(0.7)  # The times of the last steps arrive.
    found = {slow: phase for slow, _cost, phase in job.stragglers()}
    dist.barrier()
    if neighbour:
        neighbour.kill()
        neighbour.wait()
    table = job.table()
    job.close()
    return found, ever | set(found), table


def judge(trial, found, ever):
    """Returns whether the rank is right, the phase (None: not known), and whether others are accused."""
    is_rank = set(found) == {trial.slow}
    expected = PHASES[trial.kind]
    is_phase = None if expected is None else is_rank and found[trial.slow] == expected
    return is_rank, is_phase, bool(set(ever) - {trial.slow})


def run(trial, steps):
    """Returns what rank 0 found."""
    limit = 60 + steps * trial.world * 0.05
    function = functools.partial(job_of, trial, steps)
    return run_ranks(trial.world, function, backend="gloo", timeout_s=limit)[0]


def test_judge():
    trial = Trial("input", 4, 3, 0.1, 10)
    assert judge(trial, {3: "input"}, {3}) == (True, True, False)
    assert judge(trial, {3: "forward"}, {3}) == (True, False, False)
    assert judge(trial, {1: "input"}, {1, 3}) == (False, False, True)
    assert judge(trial, {}, set()) == (False, False, False)
    assert judge(trial._replace(kind="neighbour"), {3: "forward"}, {3}) == (True, None, False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=0)
    parser.add_argument("--trial", type=int)
    parser.add_argument("--clean-steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worlds", default="2,4,8")
    arguments = parser.parse_args()
    worlds = [int(world) for world in arguments.worlds.split(",")]
    test_judge()
    ok = True
    scores = collections.defaultdict(collections.Counter)
    one = arguments.trial is not None
    for index in [arguments.trial] if one else range(arguments.trials):
        trial = draw(arguments.seed, index, worlds)
        found, ever, table = run(trial, STEPS)
        is_rank, is_phase, is_false = judge(trial, found, ever)
        if one or not is_rank or is_phase is False or is_false:
            print(f"trial {index}: {trial}: {found}, ever {sorted(ever)}\n{table}", flush=True)
        for row in (trial.kind, f"({trial.world} ranks)", "all"):
            scores[row]["runs"] += 1
            scores[row]["ranks"] += is_rank
            scores[row]["known"] += is_phase is not None
            scores[row]["phases"] += bool(is_phase)
            scores[row]["false"] += is_false
    if scores:
        print("| runs with | runs | rank found | phase found | other ranks accused |\n|---|---|---|---|---|")
        for row, score in sorted(scores.items(), key=lambda item: (item[0] == "all", item[0])):
            phases = f"{score['phases']} of {score['known']}" if score["known"] else "-"
            print(f"| {row} | {score['runs']} | {score['ranks']} | {phases} | {score['false']} |")
        score = scores["all"]
        ok = score["ranks"] >= 0.99 * score["runs"] and score["phases"] >= 0.95 * score["known"]
        ok = ok and score["false"] <= 0.01 * score["runs"]
    for world in worlds if arguments.clean_steps else []:
        _, ever, table = run(Trial("none", world, 0, 0, 1 << 30), arguments.clean_steps)
        accused = f"accused: {sorted(ever)}\n{table}" if ever else "no accusation"
        print(f"| {world} ranks | {arguments.clean_steps} | {accused} |", flush=True)
        ok = ok and not ever
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
