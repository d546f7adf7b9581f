"""Prints what groups cost beside Gloo: descriptors, threads and milliseconds of 1 to 500 groups.

    python group_costs.py [--world 2] [--counts 1 10 100 500] [--backends evenkeel gloo]

Each number is the largest of all ranks, and counts what further groups add to the default one;
`init` and `end` are the times of init_process_group() and of the last destroy_process_group().
"""

import argparse
import os
import time

from groups import Ranks  # Before torch: it unsets EVENKEEL_REPLACE_GLOO.
import torch
import torch.distributed as dist


def resources():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def measure(backend, count):
    def run(rank, world, store):
        begin = time.monotonic()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        init = time.monotonic() - begin
        dist.barrier()
        before = resources()
        begin = time.monotonic()
        slowest, groups = 0, []
        for _ in range(count):
            start = time.monotonic()
            groups.append(dist.new_group())
            slowest = max(slowest, time.monotonic() - start)
        made = time.monotonic() - begin
        tensor = torch.ones(1)
        for group in groups:
            dist.all_reduce(tensor, group=group)
        assert tensor == float(world) ** count or count > 100, tensor
        after = resources()
        for group in groups:
            dist.destroy_process_group(group)
        dist.barrier()
        begin = time.monotonic()
        dist.destroy_process_group()
        end = time.monotonic() - begin
        return [
            (after[0] - before[0]) / count,
            (after[1] - before[1]) / count,
            made * 1e3 / count,
            slowest * 1e3,
            init * 1e3,
            end * 1e3,
        ]

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 10, 100, 500])
    parser.add_argument("--backends", nargs="+", default=["evenkeel", "gloo"])
    args = parser.parse_args()
    print("backend   groups  descriptors/group  threads/group  ms/group  slowest ms  init ms  end ms")
    for backend in args.backends:
        for count in args.counts:
            results = Ranks(args.world, measure(backend, count), init=False).results(300)
            bad = [value for kind, value in results if kind != "ok"]
            if bad:
                print(f"{backend:9} {count:6}  {bad[0]}", flush=True)
                continue
            row = [max(column) for column in zip(*(value for _, value in results))]
            print(
                f"{backend:9} {count:6} {row[0]:18.1f} {row[1]:14.1f} {row[2]:9.1f} {row[3]:11.1f} "
                f"{row[4]:8.0f} {row[5]:7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
