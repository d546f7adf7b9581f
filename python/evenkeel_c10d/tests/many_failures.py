"""Kills, stops and diverging collectives at random moments: every rank is told who caused it.

    python many_failures.py --cases=100 --seed=1

A case has 2 to 4 ranks, which train with DistributedDataParallel and call collectives; in half of
the cases each rank reads its batches from two forked workers of a DataLoader. At a random step one
rank kills itself with SIGKILL, stops itself with SIGSTOP, or calls another collective than the
others. Within 10 s every rank that still runs must raise evenkeel_c10d.Error with the right kind and
ranks. In the end no process may be left: the memory that ranks share has no names that could stay.
"""

import argparse
import collections
import ctypes
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import time

import torch
import torch.distributed as dist
from groups import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import evenkeel_c10d

LIMIT_S = 10
# PyTorch's workers look every 5 s whether the process that forked them is alive.
WORKERS_S = 20
KINDS = {"kill": "lost", "stop": "lost", "diverge": "disagreement"}
PR_SET_CHILD_SUBREAPER = 36

Case = collections.namedtuple("Case", "how world victim step workers")


def random_case(index, generator):
    world = generator.choice((2, 3, 4))
    return Case(
        how=list(KINDS)[index % len(KINDS)],
        world=world,
        victim=generator.randrange(world),
        step=generator.randrange(1, 40),
        workers=generator.choice((0, 2)),
    )


class Inputs(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.full((32,), float(index % 7))


def fail(case, began):
    began.value = time.monotonic()
    if case.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if case.how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.broadcast(torch.ones(3), 0)


def train(case, rank, began):
    """Returns the error that ends the training: kind, ranks, text, time."""
    model = DistributedDataParallel(nn.Linear(32, 32))
    loader = DataLoader(Inputs(), batch_size=4, num_workers=case.workers)
    try:
        for step, batch in enumerate(loader):
            if step == case.step and rank == case.victim:
                fail(case, began)
            model(batch).sum().backward()
            dist.all_reduce(torch.ones(100))
    except evenkeel_c10d.Error as error:
        return error.kind, error.ranks, str(error), time.monotonic()


def run(case):
    """Returns the largest time from the failure to an error, and sentences about what is wrong."""
    began = multiprocessing.get_context("fork").Value("d", 0.0, lock=False)
    ranks = Ranks(case.world, lambda rank, world: train(case, rank, began))
    others = [pipe for rank, pipe in enumerate(ranks.pipes) if rank != case.victim]
    deadline = time.monotonic() + 60
    for pipe in others:
        pipe.poll(max(0, deadline - time.monotonic()))
    if case.how == "stop":
        ranks.kill(case.victim)
    results = dict(enumerate(ranks.results(5)))
    if case.how != "diverge":
        results.pop(case.victim)
    slowest, wrong = 0, []
    for rank, (outcome, value) in results.items():
        if outcome != "ok" or value is None:
            wrong.append(f"rank {rank}: {outcome} {value}")
            continue
        kind, culprits, text, at = value
        slowest = max(slowest, at - began.value)
        # Where only two ranks have met that diverge, either may be wrong.
        most = 2 if case.how == "diverge" else 1
        if kind != KINDS[case.how] or case.victim not in culprits or len(culprits) > most:
            wrong.append(f"rank {rank} got {kind} of ranks {culprits}: {text}")
    if slowest > LIMIT_S:
        wrong.append(f"it took {slowest:.1f} s")
    return slowest, wrong


def processes_left():
    """Waits for the processes whose parents have ended; returns those that go on."""
    deadline = time.monotonic() + WORKERS_S
    try:
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)
    except ChildProcessError:
        return []
    return pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    # Processes whose parents are killed become children of this one.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    times, failed = {how: [] for how in KINDS}, 0
    for index in range(options.cases):
        case = random_case(index, generator)
        slowest, wrong = run(case)
        times[case.how].append(slowest)
        for sentence in wrong:
            print(f"case {index}, {case}: {sentence}", flush=True)
        failed += bool(wrong)
    for how, seconds in times.items():
        print(f"{how}: {len(seconds)} cases, at most {max(seconds, default=0):.1f} s")
    left = processes_left()
    print(f"{failed} of {options.cases} cases failed; processes left: {left}")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
