"""BalancedSampler: the weights of one process on the same batches, and faster where a rank is slow."""

import time
import unittest

from groups import run_ranks  # Before torch: it unsets EVENKEEL_REPLACE_GLOO.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenkeel_c10d

SAMPLES, BATCH, CLASSES, WORDS = 1000, 64, 5, 6
IGNORED = -100
WORKERS, PREFETCH = 2, 2


def data():
    """Sequences of words, in float64, and a label for each; some labels do not count."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, WORDS, 8, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES, WORDS), generator=generator)
    labels[torch.rand(SAMPLES, WORDS, generator=generator) < 0.4] = IGNORED
    return TensorDataset(inputs, labels)


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def make_optimizer(name, parameters):
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01)


def loss_of(model, inputs, labels, tokens):
    outputs = model(inputs)
    if tokens:
        return cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return cross_entropy(outputs[:, 0], labels[:, 0].clamp(min=0))


def order_of(epoch, shuffle=True):
    if not shuffle:
        return list(range(SAMPLES))
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(7 + epoch)).tolist()


def alone(optimizer_name, steps, accumulate, tokens):
    """The weights of one process."""
    dataset = data()
    model = make_model()
    optimizer = make_optimizer(optimizer_name, model.parameters())
    step = epoch = micro = 0
    while True:
        order = order_of(epoch)
        starts = range(0, SAMPLES, BATCH)
        for index, first in enumerate(starts):
            inputs, labels = dataset[order[first : first + BATCH]]
            (loss_of(model, inputs, labels, tokens) / accumulate).backward()
            micro += 1
            if micro == accumulate or index + 1 == len(starts):
                micro = 0
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == steps:
                    return [p.detach().clone() for p in model.parameters()]
        epoch += 1


def train(optimizer_name, steps, accumulate=1, tokens=False, hook=False, workers=0):
    """A rank function. Its last rank is slow at times; returns weights and the shares that it saw."""

    def run(rank, world):
        dataset = data()
        ddp = DistributedDataParallel(make_model())
        if hook:
            ddp.register_comm_hook(None, allreduce_hook)
        optimizer = make_optimizer(optimizer_name, ddp.parameters())
        job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
        sampler = evenkeel_c10d.BalancedSampler(
            dataset, job, BATCH, seed=7, ahead=workers * PREFETCH, accumulate=accumulate
        )
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            prefetch_factor=PREFETCH if workers else None,
        )
        shares = set()
        step = epoch = micro = 0
        while step < steps:
            sampler.set_epoch(epoch)
            for index, (inputs, labels) in enumerate(job.input(loader)):
                micro += 1
                reduces = micro == accumulate or index + 1 == len(sampler)
                ddp.require_backward_grad_sync = reduces
                weight = job.weight((labels != IGNORED).sum() if tokens else None)
                loss = loss_of(ddp, inputs, labels, tokens)
                # One in three times as long, in every other hundred steps.
                slow = rank == world - 1 and step % 100 < 50
                with job.phase("forward"):
                    time.sleep((3e-4 if slow else 1e-4) * len(inputs))
                (loss * weight / accumulate).backward()
                shares.add(tuple(sampler.shares))
                if reduces:
                    micro = 0
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    if step == steps:
                        break
            epoch += 1
        job.close()
        return [p.detach().clone() for p in ddp.parameters()], sorted(shares)

    return run


class SleepingDataset(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def throughput(balanced, seconds):
    """A rank function: the time of a step, and the last shares, with a rank of half the speed."""

    def run(rank, world):
        dataset = SleepingDataset()
        ddp = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-9)
        job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
        ahead = WORKERS * PREFETCH
        sampler = evenkeel_c10d.BalancedSampler(
            dataset, job, BATCH, shuffle=False, ahead=ahead, most=0 if balanced else BATCH // 2
        )
        loader = DataLoader(
            dataset, batch_sampler=sampler, num_workers=WORKERS, prefetch_factor=PREFETCH
        )
        begin, steps = None, 0
        started = time.monotonic()
        for inputs in job.input(loader):
            optimizer.zero_grad()
            outputs = ddp(inputs)
            with job.phase("forward"):
                time.sleep((1e-3 if rank == world - 1 else 5e-4) * len(inputs))
            (outputs.mean() * job.weight()).backward()
            optimizer.step()
            now = time.monotonic()
            late = torch.tensor(
                [now - started >= (3 if balanced else 0.2), now - started >= seconds]
            ).int()
            dist.all_reduce(late, op=dist.ReduceOp.MAX)
            if begin is not None:
                steps += 1
            elif late[0]:
                begin = now
            if late[1]:
                break
        job.close()
        return (now - begin) / steps, sampler.shares

    return run


def ledger(drop_last):
    """A rank function: the samples of two epochs, with their weights, and a pass that is resumed."""

    def run(rank, world):
        ddp = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-9)

        def epoch(job, sampler, number, batches=None):
            sampler.set_epoch(number)
            seen = []
            for indices in sampler:
                weight = job.weight()
                (ddp(torch.zeros(len(indices), 1)).mean() * weight).backward()
                seen += indices if weight > 0 else []
                if weight == 0:
                    assert len(indices) == 1
                if batches is not None and len(sampler) - batches == sampler.state_dict()["batch"]:
                    break
            return seen

        job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
        sampler = evenkeel_c10d.BalancedSampler(259, job, 64, drop_last=drop_last)
        whole = [epoch(job, sampler, number) for number in (0, 1)]
        part = epoch(job, sampler, 2, batches=2)
        state = sampler.state_dict()
        job.close()
        job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
        sampler = evenkeel_c10d.BalancedSampler(259, job, 64, drop_last=drop_last)
        sampler.load_state_dict(state)
        rest = epoch(job, sampler, 2)
        job.close()
        return whole + [part + rest]

    return run


def wrong(how):
    """A rank function that uses the sampler in a wrong way; returns what was raised."""

    def run(rank, world):
        ddp = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
        try:
            if how == "differing arguments":
                evenkeel_c10d.BalancedSampler(256, job, 16, seed=rank)
            if how == "bad arguments":
                evenkeel_c10d.BalancedSampler(256, job, 16 if rank == 0 else 1)
            if how == "bad limits":
                evenkeel_c10d.BalancedSampler(256, job, 16, least=9 if rank == 1 else 0)
            accumulate = 2 if how == "too few batches" else 1
            sampler = evenkeel_c10d.BalancedSampler(256, job, 16, accumulate=accumulate)
            if how == "other shares" and rank == 1:
                divide = job._divide
                # Sample 9 of batch 3 is computed by no rank.
                job._divide = lambda step, n: [0, 9, n] if step == 3 else divide(step, n)
            if how == "loaded ahead":
                list(sampler)
            for indices in sampler:
                weight = 1 if how == "no weight" else job.weight()
                (ddp(torch.zeros(len(indices), 1)).mean() * weight).backward()
                optimizer.step()
            return "nothing was raised"
        except (ValueError, RuntimeError) as error:
            return str(error)
        finally:
            dist.barrier()
            job.close()

    return run


class BalanceTest(unittest.TestCase):
    def test_weights_are_those_of_one_process(self):
        for options in (
            {"optimizer_name": "sgd"},
            {"optimizer_name": "adamw", "workers": WORKERS},
            {"optimizer_name": "sgd", "tokens": True},
            {"optimizer_name": "adamw", "accumulate": 2, "hook": True},
            {"optimizer_name": "sgd", "accumulate": 3, "tokens": True, "workers": WORKERS},
        ):
            with self.subTest(**options):
                expected = alone(
                    options["optimizer_name"],
                    200,
                    options.get("accumulate", 1),
                    options.get("tokens", False),
                )
                values = run_ranks(2, train(steps=200, **options), backend="gloo")
                largest = max(one.abs().max() for one in expected)
                for weights, shares in values:
                    for one, other in zip(weights, expected):
                        self.assertLess((one - other).abs().max() / largest, 1e-9)
                    self.assertEqual(shares, values[0][1])
                    self.assertGreater(len(shares), 1, "shares have not moved")

    def test_three_ranks_over_evenkeel(self):
        expected = alone("sgd", 120, 1, False)
        for weights, _shares in run_ranks(3, train("sgd", 120)):
            for one, other in zip(weights, expected):
                self.assertLess((one - other).abs().max(), 1e-9)

    def test_a_rank_of_half_the_speed_gets_fewer_samples(self):
        (balanced, shares), _ = run_ranks(2, throughput(True, 6), backend="gloo")
        (even, _), _ = run_ranks(2, throughput(False, 2), backend="gloo")
        print(f"shares {shares}: {1000 * balanced:.2f} ms, even {1000 * even:.2f} ms")
        # 43 samples of 0.5 ms take as long as 21 of 1 ms; even ones take 32 ms.
        self.assertIn(shares, ([40, 24], [44, 20]))
        self.assertLess(balanced, 0.85 * even)

    def test_each_sample_of_an_epoch_is_there_once(self):
        for world, drop_last in ((2, False), (2, True), (5, False)):
            with self.subTest(world=world, drop_last=drop_last):
                ranks = run_ranks(world, ledger(drop_last), backend="gloo")
                for epoch in range(3):
                    seen = sorted(index for rank in ranks for index in rank[epoch])
                    self.assertEqual(len(seen), 256 if drop_last else 259)
                    self.assertEqual(len(set(seen)), len(seen))
                self.assertNotEqual(ranks[0][0], ranks[0][1])

    def test_what_is_wrong_is_said_on_all_ranks(self):
        for how, text in (
            ("differing arguments", "ranks differ in seed: [0, 1] by rank"),
            ("bad arguments", "rank 1: batch_size is 1, and must be an integer from 2 on"),
            ("bad limits", "rank 1 has shares from 9 to"),
            ("no weight", "step 1 has weighed the batches []"),
            ("too few batches", "reduce gradients after 2 batches"),
            ("loaded ahead", "further ahead"),
            ("other shares", "ranks differ in their shares: rank 0: [8, 8] from sample 32 on"),
        ):
            with self.subTest(how=how):
                for said in run_ranks(2, wrong(how), backend="gloo"):
                    self.assertIn(text, said)


if __name__ == "__main__":
    unittest.main()
