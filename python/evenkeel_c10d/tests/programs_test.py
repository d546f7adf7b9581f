"""What PyTorch builds on torch.distributed: compiled functions, checkpoints, tensor and pipeline
parallelism."""

import copy
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from groups import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def collectives(x, group):
    summed = functional.all_reduce(x, "sum", group)
    gathered = functional.all_gather_tensor(summed * 2, 0, group)
    part = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    return part + functional.all_to_all_single(x, None, None, group)


def compiled(rank, world):
    x = torch.arange(world * 4, dtype=torch.float32) + rank
    expected = collectives(x, dist.group.WORLD)
    program = torch.compile(collectives, fullgraph=True, dynamic=False)
    for _ in range(3):
        assert torch.equal(program(x, dist.group.WORLD), expected)


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def sharded_model():
    model = make_model()
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer, number):
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().sum().backward()
    optimizer.step()


def weights(model):
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def save(rank, world, folder):
    model, optimizer = sharded_model()
    for number in range(3):
        step(model, optimizer, number)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    step(model, optimizer, 3)
    return weights(model)


def load(rank, world, folder):
    model, optimizer = sharded_model()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    step(model, optimizer, 3)
    return weights(model)


def tensor_parallel(rank, world):
    model = make_model()
    inputs = torch.randn(5, 6)
    expected = copy.deepcopy(model)(inputs)
    mesh = init_device_mesh("cpu", (world,))
    assert dist.get_backend(mesh.get_group()) == "evenkeel"
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(model(inputs), expected)


def pipeline(rank, world):
    """Each rank has one layer; micro-batches travel by batches of sends and receives."""
    torch.manual_seed(1)
    layers = [nn.Linear(8, 8) for _ in range(world)]
    inputs, targets = torch.randn(12, 8), torch.randn(12, 8)
    whole = nn.Sequential(*copy.deepcopy(layers))
    # A schedule averages over the micro-batches.
    nn.functional.mse_loss(whole(inputs), targets).backward()
    stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=6, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets if rank == world - 1 else None)
    torch.testing.assert_close(layers[rank].weight.grad, whole[rank].weight.grad)


class ProgramsTest(unittest.TestCase):
    def test_compiled_functional_collectives(self):
        run_ranks(2, compiled, timeout_s=240)

    def test_a_checkpoint_continues_with_another_number_of_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            saved = run_ranks(3, lambda rank, world: save(rank, world, folder))
            for world in (3, 2):
                for loaded in run_ranks(world, lambda rank, world: load(rank, world, folder)):
                    for got, expected in zip(loaded, saved[0]):
                        torch.testing.assert_close(got, expected)

    def test_tensor_parallel(self):
        run_ranks(2, tensor_parallel)

    def test_pipeline(self):
        for world in (2, 4):
            run_ranks(world, pipeline)


if __name__ == "__main__":
    unittest.main()
