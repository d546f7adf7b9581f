#!/usr/bin/python3
"""The steps of bench_step's plans in PyTorch's DistributedDataParallel over Gloo, beside the local ones.

    OMP_NUM_THREADS=1 python3 tools/step/pytorch_ddp.py [--model=gpt] [--optimizer=sgd] [--pairs=30]

mlp: 784-1024-1024-10, batch 64; gpt: 4 layers of width 128, 8 sequences of 128 bytes. Two ranks of one thread. Local and
distributed blocks take turns, and both ranks train locally at the same time, so that the cores are equally busy. Prints
medians, and the median of the paired ratios. Requires PyTorch 2 (pip install torch).
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

os.environ.pop("EVENKEEL_REPLACE_GLOO", None)  # Import torch reads it; the reference is Gloo.

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(pathlib.Path(__file__).parents[2] / "trainer" / "gpt"))
import pytorch_gpt

STEPS_PER_BLOCK = {"mlp": 20, "gpt": 4}
KINDS = ("local", "ddp", "zero")


def make_model(name):
    torch.manual_seed(0)
    if name == "gpt":
        return pytorch_gpt.Gpt(*pytorch_gpt.PRESETS["mini"])
    return torch.nn.Sequential(
        torch.nn.Linear(784, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )


def make_steps(kind, args):
    """Returns a function that trains one step and returns the seconds of the step and of its optimizer."""
    rule = torch.optim.SGD if args.optimizer == "sgd" else torch.optim.AdamW
    model = make_model(args.model)
    if kind != "local":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == "zero":
        optim = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=rule, lr=1e-3, parameters_as_bucket_view=True
        )
    else:
        optim = rule(model.parameters(), lr=1e-3)
    if args.model == "gpt":
        tokens = torch.randint(256, (2, 8, 128))
        loss_of = lambda: model(*tokens)
    else:
        images, labels = torch.rand(64, 784), torch.randint(10, (64,))
        loss_of = lambda: torch.nn.functional.cross_entropy(model(images), labels)

    def step():
        begin = time.perf_counter()
        optim.zero_grad(set_to_none=False)
        loss_of().backward()
        before_update = time.perf_counter()
        optim.step()
        end = time.perf_counter()
        return end - begin, end - before_update

    return step


def train(rank, args, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.world)
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    steps = {kind: make_steps(kind, args) for kind in KINDS}
    blocks = {kind: [] for kind in KINDS}
    for pair in range(args.pairs + 1):
        for kind in KINDS:
            dist.barrier()
            times = [steps[kind]() for _ in range(STEPS_PER_BLOCK[args.model])]
            if pair > 0:  # The first warms up.
                blocks[kind].append([statistics.median(column) for column in zip(*times)])
    if rank != 0:
        return
    for kind in KINDS:
        step, update = (statistics.median(column) * 1e3 for column in zip(*blocks[kind]))
        line = f"{kind:6} step {step:6.2f} ms   optimizer {update:6.2f} ms"
        if kind != "local":
            ratios = [mine[0] / local[0] for mine, local in zip(blocks[kind], blocks["local"])]
            line += f"   step / local {statistics.median(ratios):.2f}"
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--world", type=int, default=2)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (args, folder), nprocs=args.world)


if __name__ == "__main__":
    main()
