"""Join([DistributedDataParallel, ZeroRedundancyOptimizer]) with uneven inputs trains wrong weights.

    OMP_NUM_THREADS=1 python reproduce.py    # exit code 1 where the defect is present

An exhausted rank runs `_DDPJoinHook.main_hook` and then `_ZeROJoinHook.main_hook`. The first calls
`DistributedDataParallel._match_all_reduce_for_bwd_pass`, which all-reduces the zero buckets of
`Reducer._get_zeros_like_grad_buckets` and discards the results: no `param.grad` changes. The second
calls `ZeroRedundancyOptimizer.step`, which updates this rank's shard from `param.grad`, that is,
from the gradient of the rank's own last iteration (or from none), and broadcasts the shard.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def inputs_of(rank):  # Rank r has 2 + 2 r inputs.
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 8, generator=generator) for _ in range(2 + 2 * rank)]


def train_one_process(world_size):  # The same sums; the divisor is always the initial world size.
    model = new_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = [inputs_of(rank) for rank in range(world_size)]
    for step in range(max(map(len, inputs))):
        sgd.zero_grad()
        for batch in (own[step] for own in inputs if step < len(own)):
            (model(batch).square().mean() / world_size).backward()
        sgd.step()
    return model


def train_rank(rank, world_size, folder):
    dist.init_process_group("gloo", f"file://{folder}/init", rank=rank, world_size=world_size)
    model = DistributedDataParallel(new_model())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    with Join([model, zero]):
        for batch in inputs_of(rank):
            zero.zero_grad()
            model(batch).square().mean().backward()
            zero.step()
    torch.save(model.module.state_dict(), f"{folder}/{rank}")
    dist.destroy_process_group()


def largest_difference(world_size):
    expected = train_one_process(world_size).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_rank, (world_size, folder), nprocs=world_size)
        models = [torch.load(f"{folder}/{rank}") for rank in range(world_size)]
    return max((m[k] - expected[k]).abs().max().item() for m in models for k in expected)


if __name__ == "__main__":
    differences = {world_size: largest_difference(world_size) for world_size in (2, 3)}
    for world_size, difference in differences.items():
        print(f"torch {torch.__version__}, world {world_size}: largest difference {difference:.1e}")
    sys.exit(max(differences.values()) > 1e-6)
