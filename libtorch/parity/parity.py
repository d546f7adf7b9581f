"""Trains with libtorch's DataParallel and with PyTorch's own over Gloo, and compares the bits.

    python parity.py --program=bazel-bin/libtorch/parity/parity

With 2 ranks parameters and buffers must be equal bit for bit. With 3 and 4, where the order of sums
differs, ours must be no further from a training in float64 than PyTorch's. Prints a line per case;
the exit code is 1 if one fails.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.pop("EVENKEEL_REPLACE_GLOO", None)  # Import torch reads it; the reference is Gloo.

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# By model, the most steps.
CASES = {"mlp": 2000, "cnn": 2000, "gpt": 2000, "accumulate": 300, "unused": 300, "freeze": 300, "channels_last": 300}
DEADLINE_S = 300


class Mlp(nn.Module):
    def __init__(self, skips):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.skips = skips

    def batch(self):
        return torch.randn(8, 20)

    def forward(self, batch, step, rank):
        hidden = torch.relu(self.first(batch))
        if not self.skips or (step + rank) % 3 != 0:
            hidden = torch.relu(self.second(hidden))
        return self.third(hidden).square().mean()


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 10)

    def batch(self):
        return torch.randn(4, 3, 8, 8)

    def forward(self, batch, step, rank):
        hidden = torch.relu(self.second(torch.relu(self.norm(self.first(batch)))))
        return self.last(hidden.mean((2, 3))).square().mean()


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.queries, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def batch(self):
        return torch.randint(50, (4, 12))

    def forward(self, batch, step, rank):
        hidden = self.words(batch)
        query, key, value = self.queries(self.norm(hidden)).chunk(3, -1)
        scores = torch.matmul(query, key.transpose(1, 2)) * 0.1
        mixed = hidden + self.out(torch.matmul(torch.softmax(scores, -1), value))
        logits = F.linear(mixed, self.words.weight)
        return F.cross_entropy(logits.reshape(-1, 50), batch.reshape(-1))


def make_net(model):
    if model in ("cnn", "channels_last"):
        net = Cnn()
    elif model == "gpt":
        net = Gpt()
    else:
        net = Mlp(skips=model == "unused")
    torch.manual_seed(1)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape) * 0.1)
            if model == "channels_last" and param.dim() == 4:
                param.data = param.contiguous(memory_format=torch.channels_last)
    return net


def make_batch(net, model, step, rank, part, dtype):
    torch.manual_seed(1000 * (step + 1) + 10 * rank + part)
    batch = net.batch()
    if model == "channels_last":
        batch = batch.contiguous(memory_format=torch.channels_last)
    return batch.to(dtype) if batch.is_floating_point() else batch


def tensors_of(net):
    return [tensor.detach().contiguous() for tensor in (*net.parameters(), *net.buffers())]


def bytes_of(net):
    return b"".join(tensor.numpy().tobytes() for tensor in tensors_of(net))


def distributed(rank, world, model, steps, folder, all_have_trained):
    """PyTorch's DistributedDataParallel, in one of its ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    net = make_net(model)
    ddp = DistributedDataParallel(net, find_unused_parameters=model in ("unused", "freeze"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        if model == "freeze":
            list(net.parameters())[2].requires_grad_(step // 50 % 2 == 0)
        optimizer.zero_grad()
        if model == "accumulate":
            with ddp.no_sync():
                ddp(make_batch(net, model, step, rank, 1, torch.float32), step, rank).backward()
        ddp(make_batch(net, model, step, rank, 0, torch.float32), step, rank).backward()
        optimizer.step()
    if rank == 0:
        with open(f"{folder}/theirs", "wb") as file:
            file.write(bytes_of(net))
    # Without destructors and other ranks that leave, which are no part of the comparison.
    all_have_trained.wait(DEADLINE_S)
    os._exit(0)


def train_theirs(world, model, steps, folder):
    """Trains again if a process of PyTorch is ended by a signal, which is no result of ours."""
    for may_repeat in (True, True, False):
        all_have_trained = multiprocessing.get_context("spawn").Barrier(world)
        arguments = world, model, steps, folder, all_have_trained
        try:
            return multiprocessing.spawn(distributed, arguments, nprocs=world)
        except multiprocessing.ProcessExitedException as error:
            if error.signal_name is None or not may_repeat:
                raise
            print(f"{model}: PyTorch's DistributedDataParallel: {error}; again", flush=True)
            pathlib.Path(folder, "store").unlink(missing_ok=True)


def exact(world, model, steps):
    """One process, in float64. Without buffers' broadcast: for models that have none."""
    net = make_net(model).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            loss = net(make_batch(net, model, step, rank, 0, torch.float64), step, rank)
            (loss / world).backward()
        optimizer.step()
    return torch.cat([tensor.flatten() for tensor in tensors_of(net)])


def ours(program, world, model, steps, folder):
    ranks = []
    for rank in range(world):
        environ = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            EVENKEEL_STORE=folder,
        )
        command = [program, f"--model={model}", f"--steps={steps}", f"--out={folder}/ours"]
        ranks.append(subprocess.Popen(command, env=environ))
    codes = [rank.wait(DEADLINE_S) for rank in ranks]
    if any(codes):
        raise RuntimeError(f"{program} ended with {codes}")


def results(program, world, model, steps):
    with tempfile.TemporaryDirectory() as folder:
        ours(program, world, model, steps, folder)
        train_theirs(world, model, steps, folder)
        with open(f"{folder}/ours", "rb") as mine, open(f"{folder}/theirs", "rb") as theirs:
            return mine.read(), theirs.read()


def far(given, truth):
    return (torch.frombuffer(bytearray(given), dtype=torch.float32).double() - truth).abs().max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--program", required=True)
    parser.add_argument("--steps", type=int, default=2000, help="at most, with 2 ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    for model, most in CASES.items():
        steps = min(most, args.steps)
        mine, theirs = results(args.program, 2, model, steps)
        same = mine == theirs and len(mine) > 0
        failed |= not same
        print(f"{model}: {steps} steps, 2 ranks: {'equal' if same else 'DIFFERENT'}", flush=True)
    for world in (3, 4):
        for model in ("mlp", "gpt"):
            # Rounding grows with each step; many steps would compare chance.
            mine, theirs = results(args.program, world, model, 50)
            truth = exact(world, model, 50)
            distances = far(mine, truth), far(theirs, truth)
            near = distances[0] <= 1.2 * distances[1]
            failed |= not near
            print(
                f"{model}: {world} ranks: {distances[0]:.1e} from float64, PyTorch "
                f"{distances[1]:.1e}: {'near' if near else 'FAR'}",
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
