"""Training with PyTorch's own wrappers: bit-equal to Gloo at two ranks, close to it at more."""

import unittest

from groups import run_ranks  # Before torch: it unsets EVENKEEL_REPLACE_GLOO.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WORLDS = (1, 2, 3, 4)


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 30), nn.ReLU(), nn.Linear(30, 1))


def train(model, rank, steps=5):
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()


def ddp(rank, world):
    # Small buckets: several are in flight. The second program computes its buckets' order anew.
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.002)
    train(model, rank)
    return [p.detach().clone() for p in model.parameters()]


def ddp_hook(rank, world):
    """A communication hook in Python: callbacks of futures run on the backend's thread."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.002)

    def hook(_, bucket):
        work = dist.all_reduce(bucket.buffer().div_(world), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    train(model, rank)
    return [p.detach().clone() for p in model.parameters()]


def ddp_sparse(rank, world):
    """Each rank has other rows, some share one, and the last rank has none in each second step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Linear(8, 1))
    model = DistributedDataParallel(model)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        count = 0 if step % 2 and rank == world - 1 else 6
        words = torch.randint(10 * rank, 10 * rank + 12, (count,)) % 40
        optimizer.zero_grad()
        model(words).square().sum().div(6).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def join(rank, world):
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.002)
    with Join([model]):
        train(model, rank, steps=3 + 2 * rank)
    return [p.detach().clone() for p in model.parameters()]


def fsdp(rank, world):
    model = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    train(model, rank)
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def fsdp_allocated(rank, world):
    """The gathered parameters lie in the backend's own memory."""
    model = make_model()
    fully_shard(model)
    model.set_allocate_memory_from_process_group_for_comm(True)
    train(model, rank)
    return [p.full_tensor().detach().clone() for p in model.parameters()]


class TrainingTest(unittest.TestCase):
    def compare(self, function, other="gloo", other_function=None):
        for world in WORLDS:
            with self.subTest(world=world):
                mine = run_ranks(world, function)
                gloo = run_ranks(world, other_function or function, backend=other)
                for rank in range(world):
                    for got, same, expected in zip(mine[rank], mine[0], gloo[rank]):
                        self.assertTrue(torch.equal(got, same), "the ranks differ")
                        if world <= 2:
                            self.assertTrue(torch.equal(got, expected))
                        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)

    def test_ddp(self):
        self.compare(ddp)

    def test_ddp_with_a_hook(self):
        self.compare(ddp_hook)

    def test_ddp_with_sparse_gradients(self):
        self.compare(ddp_sparse)

    def test_join(self):
        self.compare(join)

    def test_fsdp(self):
        self.compare(fsdp)

    def test_fsdp_in_allocated_memory(self):
        self.compare(fsdp_allocated, other_function=fsdp)


if __name__ == "__main__":
    unittest.main()
