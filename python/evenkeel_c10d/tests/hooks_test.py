"""DistributedDataParallel with the communication hooks of torch, against one process.

    python hooks_test.py
    python hooks_test.py --runs=200

Most of these hooks have callbacks that call collectives. Random pauses of each rank lie before a
bucket, and between a collective and the callback of its future, so that the collective has ended
before the callback is attached on some ranks and not on others.
"""

import functools
import random
import sys
import time
import unittest

import torch
import torch.distributed as dist
from groups import VERSION, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as zero_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

RUNS = 2
WORLD = 2
STEPS = 5
WIDTH, LAYERS, BATCH = 32, 3, 12


def make_model(dtype):
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(dtype)


def typed(name):
    def register(model):
        register_ddp_comm_hook(DDPCommHookType[name], model, state=None)

    return register


def power_sgd(hook, wrap=lambda hook: hook, **options):
    def register(model):
        state = power.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, **options
        )
        model.register_comm_hook(state, wrap(hook))

    return register


def power_sgd_batched(model):
    # It gives matrices to this function, which takes batches of matrices and asserts it: torch's
    # hook fails with every backend.
    orthogonalize = power._orthogonalize
    power._orthogonalize = lambda matrix, *args: orthogonalize(
        matrix.view(-1, *matrix.shape[-2:]), *args
    )
    power_sgd(power.batched_powerSGD_hook)(model)


def post_local_sgd(model):
    state = local_sgd.PostLocalSGDState(
        process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=2
    )
    model.register_comm_hook(state, local_sgd.post_localSGD_hook)


def zero(hook, **options):
    def register(model):
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1.0, momentum=0.9
        )
        hooked = hook(default.allreduce_hook, model, optimizer, **options)
        model.register_comm_hook(dist.group.WORLD, hooked)
        return optimizer

    return register


# Name: how it is registered, the type of the weights, the error that is allowed, relative to how
# far training moves them.
HOOKS = {
    "allreduce": (typed("ALLREDUCE"), torch.float64, 1e-12),
    "fp16": (typed("FP16_COMPRESS"), torch.float64, 1e-3),
    "bf16": (typed("BF16_COMPRESS"), torch.float64, 1e-2),
    "quantized_per_tensor": (typed("QUANTIZE_PER_TENSOR"), torch.float32, 2e-2),
    "quantized_per_channel": (typed("QUANTIZE_PER_CHANNEL"), torch.float32, 2e-2),
    "power_sgd": (power_sgd(power.powerSGD_hook), torch.float64, 1e-7),
    "power_sgd_cold": (power_sgd(power.powerSGD_hook, warm_start=False), torch.float64, 1e-7),
    "power_sgd_batched": (power_sgd_batched, torch.float64, 1e-7),
    "power_sgd_fp16": (
        power_sgd(power.powerSGD_hook, default.fp16_compress_wrapper),
        torch.float32,
        2e-2,
    ),
    "post_local_sgd": (post_local_sgd, torch.float64, 1e-12),
    "zero": (zero(zero_hooks.hook_with_zero_step), torch.float64, 1e-12),
    "zero_sharded": (
        zero(zero_hooks.hook_with_zero_step, shard_buckets=True),
        torch.float64,
        1e-12,
    ),
    "zero_interleaved": (zero(zero_hooks.hook_with_zero_step_interleaved), torch.float64, 1e-12),
    "zero_interleaved_sharded": (
        zero(zero_hooks.hook_with_zero_step_interleaved, shard_buckets=True),
        torch.float64,
        1e-12,
    ),
}
if VERSION < (2, 15):  # Theirs fail with Gloo, too: they index what only NCCL's future has.
    del HOOKS["quantized_per_tensor"], HOOKS["quantized_per_channel"]


def pausing(function, pauses):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if pauses.random() < 0.2:
            time.sleep(pauses.random() * 2e-3)
        result = function(*args, **kwargs)
        if pauses.random() < 0.2:
            time.sleep(pauses.random() * 2e-3)
        return result

    return call


def train(name, rank, world):
    """Returns the weights after training with this hook."""
    register, dtype, _ = HOOKS[name]
    size = make_model(dtype)[0].weight.nbytes / 2**20
    # A bucket for each layer.
    model = DistributedDataParallel(make_model(dtype), bucket_cap_mb=size * 1.001)
    optimizer = register(model)
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    batch = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    torch.manual_seed(2)
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, BATCH, WIDTH, dtype=dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
        if not isinstance(optimizer, ZeroRedundancyOptimizer):  # Its hook makes the step.
            optimizer.step()
    buckets = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    assert len(buckets) == LAYERS, buckets
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_all(runs, rank, world):
    """Returns the weights for each hook; each run ends with the same."""
    if world > 1:
        for collective in ("all_reduce", "all_gather", "broadcast"):
            pauses = random.Random(f"{collective} {rank}")
            setattr(dist, collective, pausing(getattr(dist, collective), pauses))
    weights = {}
    for name in HOOKS:
        for run in range(runs):
            try:
                got = train(name, rank, world)
            except Exception as error:
                raise AssertionError(f"{name}, run {run}") from error
            assert torch.equal(weights.setdefault(name, got), got), f"{name} differs in run {run}"
    return weights


class HooksTest(unittest.TestCase):
    def test_hooks_train_as_one_process_does(self):
        (alone,) = run_ranks(1, functools.partial(train_all, 1))
        results = run_ranks(WORLD, functools.partial(train_all, RUNS), timeout_s=200 + RUNS * 8)
        for name, (_, dtype, tolerance) in HOOKS.items():
            with self.subTest(name):
                begin = torch.cat([p.detach().flatten() for p in make_model(dtype).parameters()])
                moved = (alone[name] - begin).norm()
                self.assertGreater(moved / begin.norm(), 0.1)
                for result in results:
                    self.assertTrue(torch.equal(result[name], results[0][name]), "the ranks differ")
                    self.assertLess((result[name] - alone[name]).norm() / moved, tolerance)


if __name__ == "__main__":
    runs = [arg for arg in sys.argv[1:] if arg.startswith("--runs=")]
    if runs:
        sys.argv.remove(runs[0])
        RUNS = int(runs[0].removeprefix("--runs="))
    unittest.main()
