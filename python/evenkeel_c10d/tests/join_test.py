"""Compares training under Join with one float64 process that adds the gradients of all ranks.

    OMP_NUM_THREADS=1 python join_test.py [world sizes, default 2 3 4]

JOIN_TEST_BACKEND names another c10d backend than gloo. JOIN_TEST_TORCH=1 runs torch's own Join.
"""

import contextlib
import copy
import dataclasses
import datetime
import functools
import io
import os
import pathlib
import re
import sys
import tempfile
import threading
import time
import traceback
from typing import Any, Callable

os.environ.pop("EVENKEEL_REPLACE_GLOO", None)  # Import torch reads it; the default here is Gloo.

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.utils.checkpoint
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from evenkeel_c10d import Join, join

BACKEND = os.environ.get("JOIN_TEST_BACKEND", "gloo")
if os.environ.get("JOIN_TEST_TORCH"):
    Join = TorchJoin
BOUND = 1e-10  # Float64: rounding of sums in another order, times some steps of an optimizer.

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


@dataclasses.dataclass
class Case:
    name: str
    optimizer: Any = SGD
    sharded: bool = True
    ddp: dict = dataclasses.field(default_factory=dict)
    counts: Callable = lambda rank, world: 2 + 2 * rank  # Inputs of the first context.
    window: int = 1  # Micro-batches per step; all but the last under no_sync.
    clip: float = 0.0
    schedule: bool = False
    evaluate: bool = False  # A forward pass without gradients after each step.
    skip: int = 0  # Each `skip`-th step is not made.
    branch: bool = False  # Some inputs use a branch of the model, others do not.
    norm: bool = False
    initial: bool = True  # divide_by_initial_world_size
    order: tuple = (0, 1)  # The order of the joinables.
    hook: Any = None
    channels_last: bool = False
    zero_view: bool = False  # parameters_as_bucket_view
    again: bool = True  # Two even steps without Join and a second uneven context.


def zero_on_0(rank, world):
    return 5 * rank


def zero_on_last(rank, world):
    return 4 * (world - 1 - rank) + (rank == 0)


def compress_hook(group, bucket):  # A Python hook: its future holds another tensor than the bucket.
    buffer = bucket.buffer() / group.size()
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].clone())


CASES = [
    Case("ddp zero sgd"),
    Case("ddp zero adamw", ADAMW),
    Case("ddp zero sgd, view", ddp={"gradient_as_bucket_view": True}),
    Case("ddp zero adamw, view", ADAMW, ddp={"gradient_as_bucket_view": True}),
    Case("rank 0 has none", counts=zero_on_0),
    Case("last rank has none", ADAMW, counts=zero_on_last),
    Case("rank 0 has none, view", ADAMW, ddp={"gradient_as_bucket_view": True}, counts=zero_on_0),
    Case("even", counts=lambda rank, world: 3),
    Case("find_unused", ddp={"find_unused_parameters": True}, branch=True),
    Case("find_unused, view, none on rank 0", ADAMW, branch=True, counts=zero_on_0,
         ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    Case("static_graph", ddp={"static_graph": True}),
    Case("static_graph, none on last", ddp={"static_graph": True}, counts=zero_on_last,
         again=False),
    Case("static_graph and find_unused", again=True,
         ddp={"static_graph": True, "find_unused_parameters": True}),
    Case("no_sync 2", window=2, counts=lambda rank, world: 4 + 2 * rank),
    Case("no_sync 3, own rest", ADAMW, window=3, counts=lambda rank, world: 4 + 5 * rank),
    Case("no_sync 2, own rest, hook", window=2, counts=lambda r, w: 3 + 3 * r, hook=compress_hook),
    # Only the last rank ends with a whole window: DDP fails where an unfinished one is dropped.
    Case("no_sync 2, find_unused", window=2, counts=lambda r, w: 3 + 2 * r + (r == w - 1),
         branch=True, ddp={"find_unused_parameters": True}),
    Case("clip", clip=0.05),
    Case("schedule", ADAMW, schedule=True),
    Case("evaluate", evaluate=True),
    Case("skipped steps", ADAMW, skip=2),
    Case("batch norm", norm=True, counts=zero_on_last),
    Case("effective world size", initial=False),
    Case("effective world size, no_sync", initial=False, window=2, counts=lambda r, w: 4 + 2 * r),
    Case("zero first", order=(1, 0)),
    Case("comm hook", hook=compress_hook),
    Case("small buckets", ADAMW, ddp={"bucket_cap_mb": 1e-4}, counts=zero_on_0),
    Case("channels last, own rest", window=2, counts=lambda r, w: 3 + 3 * r, channels_last=True),
    Case("zero view", ADAMW, zero_view=True),
    Case("plain sgd", sharded=False),
    Case("plain adamw, schedule, none on 0", ADAMW, sharded=False, schedule=True, counts=zero_on_0),
    Case("plain find_unused", sharded=False, branch=True, ddp={"find_unused_parameters": True}),
]


class Net(torch.nn.Module):
    def __init__(self, case):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, (2, 1)) if case.channels_last else None
        self.a = torch.nn.Linear(6, 12)
        self.norm = torch.nn.BatchNorm1d(12) if case.norm else torch.nn.Identity()
        self.side = torch.nn.Linear(12, 12) if case.branch else None
        self.b = torch.nn.Linear(12, 5)
        self.c = torch.nn.Linear(5, 1)

    def forward(self, x):
        if self.conv is not None:
            x = self.conv(x.view(4, 3, 2, 1)).view(4, 3).repeat(1, 2)
        x = torch.tanh(self.norm(self.a(x)))
        if self.side is not None and x.sum() > 0:
            x = x + self.side(x)
        return self.c(torch.tanh(self.b(x)))


def new_model(case):
    torch.manual_seed(7)
    layout = torch.channels_last if case.channels_last else torch.preserve_format
    return Net(case).double().to(memory_format=layout)


def inputs_of(case, phase, rank, world):
    if phase == 1:  # Even, without Join.
        count = 2 * case.window
    else:
        count = case.counts(rank if phase == 0 else world - 1 - rank, world)
    generator = torch.Generator().manual_seed(100 * phase + rank)
    return [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(count)]


def phases(case):
    return (0, 1, 2) if case.again else (0,)


def new_schedule(case, optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if case.schedule else None


def finish_step(case, step, model, optimizer, schedule):
    if case.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    if not case.skip or step % case.skip:
        optimizer.step()
    if schedule:
        schedule.step()
    optimizer.zero_grad()


def train_one_process(case, world):
    model = new_model(case)
    optimizer = case.optimizer(model.parameters())
    schedule = new_schedule(case, optimizer)
    buffers = dict(model.named_buffers())
    for phase in phases(case):
        inputs = [inputs_of(case, phase, rank, world) for rank in range(world)]
        total = max(map(len, inputs))
        optimizer.zero_grad()
        for i in range(total):
            active = [rank for rank in range(world) if i < len(inputs[rank])]
            # The divisor of a window is that of its last forward pass.
            last = min(i - i % case.window + case.window - 1, total - 1)
            divisor = world if case.initial else sum(last < len(own) for own in inputs)
            before = copy.deepcopy(buffers)
            # Join takes buffers from the highest active rank; DDP alone from rank 0.
            following = [r for r in active if i + 1 < len(inputs[r])] or active
            keep = max(following)
            if phase == 1 and i + 1 < total:
                keep = 0
            elif phase == 1:
                keep = max(r for r in range(world) if inputs_of(case, 2, r, world))
            for rank in active:
                for name, value in before.items():
                    buffers[name].copy_(value)
                (model(inputs[rank][i]).square().mean() / divisor).backward()
                if rank == keep:
                    after = copy.deepcopy(buffers)
            for name, value in after.items():
                buffers[name].copy_(value)
            if i % case.window == case.window - 1:
                finish_step(case, i // case.window, model, optimizer, schedule)
        optimizer.zero_grad()
    return model, optimizer


def train_rank(case, rank, world, group):
    model = new_model(case)
    ddp = DistributedDataParallel(model, process_group=group, **case.ddp)
    if case.hook:
        ddp.register_comm_hook(ddp.process_group, case.hook)
    if case.sharded:
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), case.optimizer.func, group,
            parameters_as_bucket_view=case.zero_view, **case.optimizer.keywords
        )
    else:
        optimizer = case.optimizer(ddp.parameters())
    schedule = new_schedule(case, optimizer)

    def loop(phase):
        for i, batch in enumerate(inputs_of(case, phase, rank, world)):
            if i % case.window == case.window - 1:
                ddp(batch).square().mean().backward()
                finish_step(case, i // case.window, ddp, optimizer, schedule)
            else:
                with ddp.no_sync():
                    ddp(batch).square().mean().backward()
            if case.evaluate:
                with torch.no_grad():
                    ddp(batch)

    objects = [(ddp, optimizer)[i] for i in case.order] + ([schedule] if schedule else [])
    if Join is TorchJoin:
        objects = [o for o in objects if isinstance(o, Joinable)]
    for phase in phases(case):
        if phase == 1:
            loop(phase)
        else:
            with Join(objects, divide_by_initial_world_size=case.initial):
                loop(phase)
        if case.window > 1:  # Drops the gradients of an unfinished window.
            optimizer.zero_grad()
    if case.sharded:  # Each rank's own shard.
        state = {p: s for p, s in optimizer.optim.state.items()}
    else:
        state = optimizer.state
    return model, state, [g["lr"] for g in optimizer.param_groups]


def difference(case, rank, world, group=None):
    """Returns the largest difference of weights, buffers, states and rates of this rank."""
    model, state, rates = train_rank(case, rank, world, group)
    expected, optimizer = train_one_process(case, world)
    largest = 0.0
    pairs = list(model.state_dict().items())
    for name, value in pairs:
        other = expected.state_dict()[name]
        largest = max(largest, (value - other).abs().max().item())
    twin = dict(zip(model.parameters(), expected.parameters()))
    for param, values in state.items():
        for key, value in values.items():
            other = optimizer.state[twin[param]].get(key)
            if value is None or other is None:
                assert value is other, (key, value, other)
                continue
            largest = max(largest, (value - other).abs().max().item())
    owned = set(state)
    if not case.sharded:
        assert len(owned) == len(optimizer.state), "missing state"
    for rate, group in zip(rates, optimizer.param_groups):
        largest = max(largest, abs(rate - group["lr"]))
    return largest


# Programs with several models, forward passes and backward passes, and what surrounds their steps.
# `step` trains with the batches of the ranks that have one, and divides by the world size: a rank
# has one batch and divides by 1, the reference has all.


def mlp(sizes, seed=3):
    torch.manual_seed(seed)
    pairs = zip(sizes, sizes[1:])
    return torch.nn.Sequential(
        *[layer for pair in pairs for layer in (torch.nn.Linear(*pair), torch.nn.Tanh())]
    ).double()


@dataclasses.dataclass
class Program:
    models: list
    optimizers: list
    rank: int  # -1 in the reference.
    more: dict = dataclasses.field(default_factory=dict)

    def backward(self, loss_of, batches, divisor, model=0):
        for batch in batches:
            (loss_of(self.models[model], batch) / divisor).backward()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def only_loss(self, batches, divisor):
        self.backward(square, batches, divisor)

    @property
    def distributed(self):
        return self.rank >= 0


def square(model, batch):
    return model(batch).square().mean()


def clamp(program, batches, divisor, i):
    program.only_loss(batches, divisor)
    program.step()
    for param in program.models[0].parameters():
        param.data.clamp_(-0.1, 0.1)


class Slow:
    """The weights of Lookahead: state of the program's own."""

    def __init__(self, model):
        self.weights = [param.detach().clone() for param in model.parameters()]

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def lookahead(program, batches, divisor, i):
    program.only_loss(batches, divisor)
    program.step()
    with torch.no_grad():
        for slow, param in zip(program.more["slow"].weights, program.models[0].parameters()):
            if i % 2:
                slow.lerp_(param, 0.5)
                param.copy_(slow)


def pre_hook(program, batches, divisor, i):
    if "hook" not in program.more:
        program.more["hook"] = program.optimizers[0].register_step_pre_hook(
            lambda *_: [p.grad.mul_(0.5) for p in program.models[0].parameters()] and None
        )
    program.only_loss(batches, divisor)
    program.step()


def added_group(program, batches, divisor, i):
    program.only_loss(batches, divisor)
    program.step()
    if i == 2:  # A rank without input has not run this.
        params = list(program.models[0].parameters())[2:]
        group = {"params": params, "lr": 0.01}
        program.optimizers[0].add_param_group(group)


def two_backwards(program, batches, divisor, i):
    program.only_loss(batches, divisor)
    program.backward(lambda model, x: model(x).abs().mean(), batches, divisor)
    program.step()


class Heads(torch.nn.Module):
    """Has two results that share no parameter."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.other = layers, copy.deepcopy(layers)

    def forward(self, x):
        return self.layers(x), self.other(x)


def shared_reduction(program, batches, divisor, i):
    """The first backward pass gives a part of the gradients, the second one the rest."""
    for batch in batches:
        for output in program.models[0](batch):
            (output.square().mean() / divisor).backward()
        if program.distributed:
            dist.all_reduce(torch.ones(1))
    program.step()


def kept_and_zeroed(program, batches, divisor, i):
    program.only_loss(batches, divisor)
    if i % 2:
        program.optimizers[0].step()
        program.optimizers[0].zero_grad(set_to_none=False)


def gan(program, batches, divisor, i):
    generator, discriminator = program.models
    g_optimizer, d_optimizer = program.optimizers
    d_optimizer.zero_grad()
    program.backward(lambda model, x: (model(x) - 1).square().mean(), batches, divisor, 1)
    fakes = [generator(batch[:, :3]) for batch in batches]
    for fake in fakes:
        (discriminator(fake.detach()).square().mean() / divisor).backward()
    d_optimizer.step()
    g_optimizer.zero_grad()
    for fake in fakes:
        ((discriminator(fake) - 1).square().mean() / divisor).backward()
    g_optimizer.step()


def pix2pix(program, batches, divisor, i):
    """The discriminator is frozen while the generator trains, so also between the epochs."""
    generator, discriminator = program.models
    fakes = [generator(batch[:, :3]) for batch in batches]
    for optimizer, is_of_generator in zip(reversed(program.optimizers), (False, True)):
        for param in discriminator.parameters():
            param.requires_grad_(not is_of_generator)
        optimizer.zero_grad()
        for fake in fakes:
            output = discriminator(fake if is_of_generator else fake.detach())
            ((output - float(is_of_generator)).square().mean() / divisor).backward()
        optimizer.step()


def twin_critics(program, batches, divisor, i):
    first, second = program.models
    for batch in batches:
        with torch.no_grad():
            target = torch.minimum(first(batch), second(batch))
        both = (first(batch) - target - 1).square() + (second(batch) - target - 1).square()
        (both.mean() / divisor).backward()
    program.step()


def siamese(program, batches, divisor, i):
    def contrast(model, batch):
        return (model(batch) - model(batch.flip(1))).square().mean()

    program.backward(contrast, batches, divisor)
    program.step()


class Checkpointed(torch.nn.Module):
    """Each layer has a backward pass inside of that of the module."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return x


def checkpointed(program, batches, divisor, i):
    program.only_loss(batches, divisor)
    program.step()


def episodes(program, batches, divisor, i):
    """Actor and critic: episodes have different lengths, and some forward passes no backward."""
    actor, critic = program.models
    for batch in batches:
        length = 1 + int(batch.abs().sum() * 10) % 4
        actor(batch)
        seen = [batch[:k + 1] for k in range(length)]
        loss = sum(actor(part).mean() * critic(part).mean() for part in seen)
        (loss / divisor).backward()
    program.step()


def language_model(program, batches, divisor, i):
    """Accumulates two micro-batches, logs, evaluates and saves on rank 0."""
    model = program.models[0]
    for micro in range(2):
        with contextlib.ExitStack() as stack:
            if program.distributed and micro == 0:
                stack.enter_context(model.no_sync())
            program.backward(lambda m, x: m(x[micro::2]).square().mean() / 2, batches, divisor)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    program.step()
    if program.distributed:
        log_everything(program.rank, None)
        log_everything(program.rank, program.more["group"])
        if program.rank == 0:
            with torch.no_grad():
                model.eval()
                model(batches[0])
                model.train()
            torch.save(model.state_dict(), io.BytesIO())
        dist.barrier()


def log_everything(rank, group):
    """Collectives of a program: their results are those of the ranks that have input."""
    world = dist.get_world_size()
    ones = torch.ones(world, dtype=torch.int64)  # As large as what Join itself could send.
    dist.all_reduce(ones, group=group)
    active = int(ones[0])
    assert 1 <= active <= world and ones.unique().numel() == 1, ones
    value = torch.tensor([2.0 + rank, -2.0])
    for op, least, largest in (("AVG", 2, 1 + world), ("MIN", 2, 1 + world),
                               ("MAX", 2, 1 + world), ("SUM", 2, 3 * world * world)):
        result = value.clone()
        dist.all_reduce(result, getattr(dist.ReduceOp, op), group)
        assert least <= result[0] <= largest, (op, result)
        assert result[1] == (-2 * active if op == "SUM" else -2), (op, result)
    product = torch.tensor([3])
    work = dist.all_reduce(product, dist.ReduceOp.PRODUCT, group, async_op=True)
    work.wait()
    assert product == 3**active, product
    dist.reduce(value, 0, group=group)
    dist.barrier(group)


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """As many on GitHub: its state has the scheduler that follows, and a function."""

    def __init__(self, optimizer, after):
        self.after, self.rate = after, lambda step: 0.02 * (1 + step)
        super().__init__(optimizer)

    def get_lr(self):
        return [self.rate(self.last_epoch)]

    def step(self, epoch=None):
        if self.last_epoch < 2:
            super().step()
        else:
            self.after.step()


class Wrapper(torch.optim.Optimizer):
    """An optimizer without groups of its own."""

    def __init__(self):
        pass


def unlisted(program, batches, divisor, i):
    """Nothing but the model is in the list of Join."""
    more, optimizer = program.more, program.optimizers[0]
    scaled = lambda model, batch: more["scaler"].scale(square(model, batch))  # noqa: E731
    program.backward(scaled, batches, divisor)
    more["scaler"].step(optimizer)
    more["scaler"].update()
    optimizer.zero_grad()
    more["schedule"].step()
    more["average"].update_parameters(program.models[0])
    more["moving average"].update_parameters(program.models[0])


def carried(program, batches, divisor, i):
    program.only_loss(batches, divisor)
    program.step()


def carried_cleared(program, batches, divisor, i):
    program.optimizers[0].zero_grad()
    program.only_loss(batches, divisor)
    program.optimizers[0].step()


PROGRAMS = [shared_reduction, clamp, lookahead, pre_hook, added_group, two_backwards,
            kept_and_zeroed, gan, pix2pix, twin_critics, siamese, checkpointed, episodes, language_model, unlisted, carried,
            carried_cleared]
TWO_MODELS = {gan: ((3, 6), (6, 4, 1)), pix2pix: ((3, 6), (6, 4, 1)),
              twin_critics: ((6, 4, 1), (6, 4, 1)), episodes: ((6, 4, 1), (6, 4, 1))}
# In the second epoch the ranks have these in reverse order.
COUNTS = {"uneven": lambda rank, world: 2 + 2 * rank, "none": lambda rank, world: 3 * rank}


def run_program(step, counts, sharded, rank, world):
    """Trains two epochs on the rank, or with the batches of all ranks if it is -1."""
    is_reference = rank < 0
    sizes = TWO_MODELS.get(step, ((6, 5, 1),))
    models = [mlp(size, seed) for seed, size in enumerate(sizes)]
    if step is checkpointed:
        models = [Checkpointed(model) for model in models]
    elif step is shared_reduction:
        models = [Heads(model) for model in models]
    kind = ADAMW if step is unlisted else SGD
    optimizers = []
    for i, model in enumerate(models):
        params = list(model.parameters())
        if step is added_group:
            params = params[:2]
        if sharded and not is_reference:
            view = step is pix2pix  # Its buckets have no frozen parameters.
            optimizers.append(ZeroRedundancyOptimizer(
                params, kind.func, parameters_as_bucket_view=view, **kind.keywords))
        else:
            optimizers.append(kind(params))
    if not is_reference:
        models = [DistributedDataParallel(model, bucket_cap_mb=1e-4) for model in models]
    program = Program(models, optimizers, rank)
    if step is unlisted:
        module = models[0] if is_reference else models[0].module
        program.more["average"] = torch.optim.swa_utils.AveragedModel(module)
        program.more["moving average"] = torch.optim.swa_utils.AveragedModel(
            module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for key in ("average", "moving average"):
            program.more[key].update_parameters(module)
        schedules = torch.optim.lr_scheduler
        parts = [schedules.StepLR(optimizers[0], 2, 0.5), schedules.StepLR(optimizers[0], 1, 0.7)]
        after = schedules.SequentialLR(optimizers[0], parts, [3])
        program.more["schedule"] = Warmup(optimizers[0], after)
        program.more["wrapper"] = Wrapper()
        program.more["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
    ranks = range(world) if is_reference else [rank]
    divisor = world if is_reference else 1
    listed = [*models, *(optimizers if sharded or step is not unlisted else ())]
    if step is language_model and not is_reference:
        program.more["group"] = dist.new_group()
    if step is lookahead:
        program.more["slow"] = Slow(models[0])
        listed.append(program.more["slow"])
    if step in (carried, carried_cleared):  # Passes before the context, without a reduction.
        for r in ranks:
            with contextlib.nullcontext() if is_reference else models[0].no_sync():
                batch = inputs_of(Case(""), 5, r, world)[0]
                program.backward(square, [batch], divisor)
    for epoch in range(2):
        inputs = [
            [torch.randn(4, 6, dtype=torch.float64,
                         generator=torch.Generator().manual_seed(50 * epoch + 7 * i + r))
             for i in range(counts(r if epoch == 0 else world - 1 - r, world))]
            for r in ranks
        ]
        with contextlib.nullcontext() if is_reference else Join(listed):
            for i in range(max(map(len, inputs))):
                step(program, [own[i] for own in inputs if i < len(own)], divisor,
                     i + 10 * epoch)
    return program


def program_difference(step, counts, sharded, rank, world):
    program = run_program(step, counts, sharded, rank, world)
    expected = run_program(step, counts, sharded, -1, world)
    differences = [0.0]

    def compare(value, other):
        if torch.is_tensor(value):
            differences.append((value - other).abs().max().item())
        else:
            assert value == other, (value, other)

    for mine, theirs in zip(program.models, expected.models):
        twin = dict(zip(mine.parameters(), theirs.parameters()))
        for param, other in twin.items():
            compare(param, other)
        for optimizer, reference in zip(program.optimizers, expected.optimizers):
            inner = optimizer.optim if sharded else optimizer
            for param, state in inner.state.items():
                if param in twin:
                    for key, value in state.items():
                        compare(value, reference.state[twin[param]][key])
            assert len(optimizer.param_groups) == len(reference.param_groups)
            if not sharded:
                assert len(optimizer.state) == len(reference.state)
            for group, other in zip(optimizer.param_groups, reference.param_groups):
                assert group["lr"] == other["lr"], (group["lr"], other["lr"])
    for key, value in program.more.items():
        if "average" in key:
            assert value.n_averaged == expected.more[key].n_averaged
            for param, other in zip(value.parameters(), expected.more[key].parameters()):
                compare(param, other)
        elif key == "schedule":
            assert value.last_epoch == expected.more[key].last_epoch
        elif key == "scaler":
            assert value.state_dict() == expected.more[key].state_dict()
    return max(differences)


def check_programs(rank, world):
    wanted = os.environ.get("JOIN_TEST_PROGRAM", "")
    for step in PROGRAMS:
        if wanted and step.__name__ != wanted:
            continue
        for name, counts in COUNTS.items():
            for sharded in (False, True):
                value = torch.tensor([program_difference(step, counts, sharded, rank, world)])
                dist.all_reduce(value, dist.ReduceOp.MAX)
                text = f"{step.__name__}, {name}, {'ZeRO' if sharded else 'plain'}: {value.item()}"
                if wanted and rank == 0:
                    print(text, flush=True)
                assert value <= BOUND, text


# Other tests, on the same group.


class Counter(Joinable):
    """The Joinable of torch's tutorial: counts the inputs of all ranks."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __call__(self, count=1):
        TorchJoin.notify_join_context(self)
        value = torch.tensor([count])
        dist.all_reduce(value)
        self.total += value.item()

    def join_hook(self, **kwargs):
        counter = self

        class Hook(JoinHook):
            def main_hook(self):
                counter(0)

        return Hook()

    join_device = torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


def check_custom_joinable(rank, world):
    counter = Counter()
    with Join([counter]):
        for _ in range(3 * rank):
            counter()
    expected = sum(3 * r for r in range(world))
    assert counter.total == expected, (counter.total, expected)


def check_throw(rank, world):
    ddp = DistributedDataParallel(new_model(CASES[0]))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    steps = 0
    try:
        with Join([ddp, zero], throw_on_early_termination=True):
            for batch in inputs_of(CASES[0], 0, rank, world):
                ddp(batch).sum().backward()
                zero.step()
                steps += 1
    except RuntimeError as error:
        wanted = "Rank 0 exhausted all inputs" if rank == 0 else "Detected at least one rank"
        assert wanted in str(error), error
    else:
        raise AssertionError("no exception")
    assert steps == 2, steps
    dist.all_reduce(torch.ones(1))  # The group is still in step.


def check_disabled_and_copied(rank, world):
    ddp = DistributedDataParallel(new_model(CASES[0]))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with Join([ddp, zero], enable=False):
        ddp(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
        zero.step()
    with Join([ddp, zero]):
        ddp(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
        zero.step()
        torch.save(ddp, io.BytesIO())
    assert not ddp._join_config.enable and not zero._join_config.enable


def check_arguments(rank, world):
    bag = DistributedDataParallel(torch.nn.EmbeddingBag(3, 2, sparse=True))
    hooked = DistributedDataParallel(torch.nn.BatchNorm1d(3))
    hooked._register_buffer_comm_hook(None, lambda state, buffers: [])  # After the forward pass.
    for wrong, kind in (([], ValueError), ([object()], TypeError), ([bag], ValueError),
                        ([hooked], ValueError)):
        try:
            Join(wrong)
        except kind:
            continue
        raise AssertionError(f"{wrong} was accepted")


def check_failed_entry(rank, world):
    """A context that cannot be entered leaves nothing behind, and contexts may be nested."""
    ddp = DistributedDataParallel(mlp((6, 4, 1)))
    broken = DistributedDataParallel(mlp((6, 4, 1)))
    broken.reducer = None
    try:
        with Join([ddp, broken]):
            raise AssertionError("the context was entered")
    except AttributeError:
        pass
    batch = torch.ones(4, 6, dtype=torch.float64)
    with Join([ddp]):
        with Join([DistributedDataParallel(mlp((6, 4, 1)))]):
            pass
        for _ in range(rank):  # The hooks of the outer context are still there.
            square(ddp, batch).backward()
            dist.all_reduce(torch.ones(1))
    square(ddp, batch).backward()


def check_zero_alone(rank, world):
    """Without DDP each step is announced; the source's gradients are used."""
    for is_sparse in (False, True):
        model = torch.nn.Linear(3, 2).double()
        torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        with Join([zero]):
            for i in range(1 + rank):
                for p in model.parameters():
                    p.grad = torch.full_like(p, 2.0**-i)
                    p.grad = p.grad.to_sparse() if is_sparse else p.grad
                zero.step()
        expected = 1 - sum(2.0**-i for i in range(world))
        for p in model.parameters():
            assert (p - expected).abs().max() < 1e-12, (rank, p, expected)


class Summed(torch.autograd.Function):
    """Has a collective in its backward pass."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def nest(function, x, depth):
    if depth == 0:
        return function(x)
    return torch.utils.checkpoint.checkpoint(nest, function, x, depth - 1, use_reentrant=True)


class Nested(torch.nn.Module):
    """From 60 passes inside of each other on, the engine takes threads without frames of Python,
    as those of a GPU are."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return nest(lambda y: Summed.apply(self.layers(y)), x.clone().requires_grad_(), 61)


def check_threads_of_the_engine(rank, world):
    model, twin = (mlp((6, 4, 1)) for _ in range(2))
    batch = torch.ones(4, 6, dtype=torch.float64)
    ddp = DistributedDataParallel(Nested(model))
    with Join([ddp]):
        for _ in range(1 + rank):
            square(ddp, batch).backward()
    for active in range(1, world + 1):
        (square(twin, batch) * active**2 / world).backward()
    for param, other in zip(model.parameters(), twin.parameters()):
        assert (param.grad - other.grad).abs().max() < BOUND, (param.grad, other.grad)


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.halves = torch.nn.ModuleList([mlp((6, 6)), mlp((6, 1))])

    def forward(self, x, half):
        return self.halves[half](x)


def check_alternating(rank, world):
    """Two reductions that alternate work with equal inputs, else all ranks raise."""
    batch = torch.ones(4, 6, dtype=torch.float64)
    for count, options in ((1, {}), (1 + rank, {}), (1 + rank, {"find_unused_parameters": True})):
        outer = DistributedDataParallel(Halves(), bucket_cap_mb=1e-4, **options)
        inner = DistributedDataParallel(mlp((6, 6)), bucket_cap_mb=1e-4)
        try:
            with Join([outer, inner]):
                for _ in range(count):
                    outer(inner(outer(batch, 0)), 1).sum().backward()
        except RuntimeError as error:
            assert "joinable 0 began before that of joinable 1" in str(error), error
            assert world > 1 and count > 1 or rank == 0, error
        else:
            assert (count, rank) == (1, rank) and not (rank == 0 and options), "no exception"
        dist.all_reduce(torch.ones(1))


def check_subgroup(rank, world):
    """In a group, ranks are not those of the world."""
    if world > 2:
        group = dist.new_group(range(1, world))
        if rank > 0:
            for case in (CASES[0], CASES[5]):
                assert difference(case, rank - 1, world - 1, group) <= BOUND

def expect_error(words, rank, world, step, **options):
    """All ranks raise a RuntimeError with these words, and the group is still in step."""
    model = DistributedDataParallel(mlp((6, 4, 1)))
    other = DistributedDataParallel(mlp((6, 4, 1)))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    count = options.pop("counts", 1 + rank)
    try:
        with Join([model, zero], **options):
            for _ in range(count):
                step(model, zero, other)
    except RuntimeError as error:
        for word in words:
            assert word in str(error), error
    else:
        raise AssertionError(f"no exception with {words}")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones == world


def train_step(model, zero, other):
    square(model, torch.ones(4, 6, dtype=torch.float64)).backward()
    zero.step()
    zero.zero_grad()


def gathered(model, zero, other):  # Contrastive training with the embeddings of all ranks.
    embedding = model(torch.ones(4, 6, dtype=torch.float64))
    every = [torch.empty_like(embedding) for _ in range(dist.get_world_size())]
    dist.all_gather(every, embedding.detach())
    sum(every, embedding).square().mean().backward()
    zero.step()


def from_rank_0(model, zero, other):
    train_step(model, zero, other)
    dist.broadcast(torch.ones(2), 0)


def weights_are_added(model, zero, other):
    train_step(model, zero, other)
    for param in model.parameters():
        dist.all_reduce(param.data)
        param.data /= dist.get_world_size()


def one_adds_weights(model, zero, other):  # One rank alone sees that it is one.
    train_step(model, zero, other)
    for param in model.parameters():
        is_last = dist.get_rank() == dist.get_world_size() - 1
        dist.all_reduce(param.data if is_last else param.detach().clone())


def weights_are_averaged(model, zero, other):
    train_step(model, zero, other)
    square(model, torch.ones(4, 6, dtype=torch.float64)).backward()
    averagers.PeriodicModelAverager(period=4).average_parameters(model.parameters())


def message(model, zero, other):
    train_step(model, zero, other)
    rank = dist.get_rank()
    if rank == 0:
        dist.recv(torch.ones(1), dist.get_world_size() - 1)
    elif rank == dist.get_world_size() - 1:
        dist.send(torch.ones(1), 0)


def sparse_sum(model, zero, other):
    train_step(model, zero, other)
    dist.all_reduce(torch.ones(2, 2).to_sparse())


def nested(model, zero, other):
    train_step(model, zero, other)
    with Join([other]):
        pass


def nested_again(model, zero, other):
    with Join([model]):
        pass


def with_closure(model, zero, other):  # One rank alone.
    closure = lambda: square(model, torch.ones(4, 6, dtype=torch.float64))  # noqa: E731
    zero.step(closure if dist.get_rank() == 0 else None)


def not_listed(model, zero, other):
    square(other, torch.ones(4, 6, dtype=torch.float64)).backward()
    train_step(model, zero, other)


def kept_over_no_sync(model, zero, other):
    batch = torch.ones(4, 6, dtype=torch.float64)
    square(model, batch).backward()
    with model.no_sync():
        square(model, batch).backward()
    square(model, batch).backward()
    zero.zero_grad()


def check_documentation(rank, world):
    """The examples of docs/pytorch.md run with uneven inputs, and end with equal weights."""
    page = pathlib.Path(__file__).parents[3] / "docs" / "pytorch.md"
    section = page.read_text().split("## Uneven inputs")[1].split("\n## ")[0]
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 4, len(examples)
    for example in examples:
        ddp, generator, discriminator = (
            DistributedDataParallel(mlp(sizes)) for sizes in ((6, 4, 1), (3, 6), (6, 4, 1))
        )
        models = (ddp, generator, discriminator)
        optimizer, g_optimizer, d_optimizer = (ADAMW(model.parameters()) for model in models)
        names = {
            "Join": Join, "torch": torch, "dist": dist, "rank": rank,
            "ddp": ddp, "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            "generator": generator, "g_optimizer": g_optimizer, "d_optimizer": d_optimizer,
            "discriminator": discriminator, "loss": lambda output: output.square().mean(),
            "loader": inputs_of(CASES[0], 0, rank, world), "path": io.BytesIO(),
        }
        exec(example, names)
        values = [p.detach() for model in models for p in model.parameters()]
        values += [torch.tensor([optimizer.param_groups[0]["lr"]])]
        values += [names["average"].n_averaged] if "average" in names else []
        values += [torch.tensor(names["progress"].steps)] if "progress" in names else []
        for value in values:
            every = [torch.empty_like(value) for _ in range(world)]
            dist.all_gather(every, value.contiguous())
            assert all(torch.equal(value, other) for other in every), example


def check_errors(rank, world):
    here = "join_test.py:"
    no_input = "rank 0 had no more input" if world == 2 else "ranks 0, 1 had no more input"
    uneven = dict(counts=3 if rank == world - 1 else 2)
    for step, words in {
        gathered: ("all_gather", here, no_input, "nothing to contribute", "throw_on_early"),
        from_rank_0: ("broadcast", here, no_input, "its source is rank 0"),
        weights_are_added: ("all_reduce", here, no_input, "weights of all ranks", "AVG"),
        weights_are_averaged: ("all_reduce", here, no_input, "weights of all ranks", "AVG"),
        message: ("send", here, no_input, "rank 0 does not answer"),
        nested: ("all_gather", here, no_input, "nothing to contribute"),
        not_listed: ("all_reduce", here, no_input, "not in the list"),
    }.items():
        expect_error(words, rank, world, step, **uneven)
    expect_error(("all_reduce", here, no_input, "sparse tensors"), rank, world, sparse_sum,
                 counts=int(rank == world - 1))
    expect_error(("all_reduce", "rank 0 had no", "weights of all ranks"), rank, world,
                 one_adds_weights, counts=2 + (rank > 0))
    expect_error(("joinable 0 is in another context",), rank, world, nested_again, counts=1)
    expect_error(("step(closure)", "call the closure before"), rank, world, with_closure, counts=1)
    expect_error(("no_sync", no_input), rank, world, kept_over_no_sync, **uneven)


class Listed:
    """An object in the list of Join whose state cannot travel, or not be loaded."""

    def __init__(self, state, can_load=True):
        self.state, self.can_load = state, can_load

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        if not self.can_load:
            raise ValueError("an old version")


def reject():
    if dist.get_rank() == 0:
        raise ValueError("no such class")


class Rejected:
    """Cannot be unpickled on rank 0."""

    def __reduce__(self):
        return reject, ()


class Schedule:
    """Can be called, and has a state."""

    calls = 0

    def __call__(self):
        self.calls += 1


class Keeper:
    def __init__(self):
        self.schedule, self.function = Schedule(), lambda: self

    def state_dict(self):
        return {"schedule": self.schedule, "function": self.function}

    def load_state_dict(self, state):
        self.schedule, self.function = state["schedule"], state["function"]


def check_states(rank, world):
    ddp = DistributedDataParallel(mlp((6, 4, 1)))
    keeper = Keeper()
    with Join([ddp, keeper]):
        for _ in range(1 + rank):
            square(ddp, torch.ones(4, 6, dtype=torch.float64)).backward()
            keeper.schedule()
    assert keeper.schedule.calls == world, keeper.schedule.calls
    assert keeper.function() is keeper  # It is the rank's own.
    param = torch.nn.Parameter(torch.ones(2, device="meta"))
    join._set_gradients([(param, torch.ones(2))])
    assert param.grad.is_meta  # Of a model on several devices.


def check_static_graph_without_input(rank, world):
    """All ranks raise, not only the one whose reducer lacks the graph."""
    batch = torch.ones(4, 6, dtype=torch.float64)
    for buffers in (False, True):
        layers = [torch.nn.Linear(6, 1), *([torch.nn.BatchNorm1d(1)] if buffers else [])]
        model = DistributedDataParallel(
            torch.nn.Sequential(*layers).double(), static_graph=True)
        try:
            for count in (min(rank, 1), int(rank == world - 1), 2):
                with Join([model]):
                    for _ in range(count):
                        square(model, batch).backward()
        except RuntimeError as error:
            assert count == 2 and "rank 0: RuntimeError" in str(error), error
            assert "construct DistributedDataParallel again" in str(error), error
        else:
            raise AssertionError("no exception")
        dist.all_reduce(torch.ones(1))


def check_errors_at_the_end(rank, world):
    """What one rank alone notices ends all ranks, at once and with its words."""
    batch = torch.ones(4, 6, dtype=torch.float64)

    def run(words, sharded=False, more=lambda model: (), used=lambda model, *_: None):
        model = DistributedDataParallel(mlp((6, 4, 1)))
        more = more(model)
        listed = [other for other in more if isinstance(other, Listed)]
        if sharded:
            listed.append(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
        try:
            with Join([model, *listed]):
                for i in range(2 + rank):
                    square(model, batch).backward()
                    if i == 2:
                        used(model, *(more or listed))
                    if sharded:
                        listed[-1].step()
        except RuntimeError as error:
            for word in words:
                assert word in str(error), error
        else:
            raise AssertionError(f"no exception with {words}")
        dist.all_reduce(torch.ones(1))

    def scale(model, first, *_):
        first.scale(torch.ones(1))
        first.update(7.0)

    def step(model, optimizer):
        optimizer.step()

    def grow(model, optimizer):
        optimizer.add_param_group({"params": [torch.nn.Parameter(batch.clone())]})

    last = f"rank {world - 1}: "
    run((last, "pickle"), more=lambda model: [Listed(Listed(threading.Lock()))])
    def mark(model, optimizer):
        optimizer.param_groups[0]["mark"] = Rejected()

    run(("rank 0: ", "no such class"), more=lambda model: [Listed(Rejected())])
    run(("rank 0: ", "no such class"), sharded=True, used=mark)
    run(("rank 0: ", "an old version"), more=lambda model: [Listed(1, False)])
    run(("rank 0: ", "a GradScaler was used", "add it to the list"), used=scale,
        more=lambda model: [torch.amp.GradScaler("cpu") for _ in range(2)])
    outside = torch.nn.Parameter(torch.ones(2))
    run((last, "SGD", "add it to the list"), used=step,
        more=lambda model: [torch.optim.SGD([*model.parameters(), outside], lr=0.1)])
    run(("rank 0: ", "group of parameters was added"), sharded=True, used=grow)


CHECKS = [check_custom_joinable, check_throw, check_disabled_and_copied, check_arguments,
          check_failed_entry, check_zero_alone, check_threads_of_the_engine,
          check_alternating, check_subgroup, check_programs, check_errors, check_errors_at_the_end,
          check_states, check_static_graph_without_input, check_documentation]


def init(rank, world, folder, seconds):
    dist.init_process_group(BACKEND, f"file://{folder}/init", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=seconds))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert BACKEND != "gloo" or isinstance(backend, dist.ProcessGroupGloo)


def run_rank(rank, world, folder, wanted):
    torch.set_num_threads(1)
    init(rank, world, folder, 60)
    for item in [*CASES, *CHECKS]:
        name = item.name if isinstance(item, Case) else item.__name__
        if wanted and wanted not in name:
            continue
        try:
            if isinstance(item, Case):
                values = torch.tensor([difference(item, rank, world)])
                dist.all_reduce(values, dist.ReduceOp.MAX)
                is_right, text = values.item() <= BOUND, f"{values.item():.1e}"
            else:
                item(rank, world)
                is_right, text = True, "ok"
        except Exception:
            print(f"rank {rank}: {name}:\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        if rank == 0:
            print(f"world {world}  {name:40s} {text}{'' if is_right else '  WRONG'}", flush=True)
        if not is_right and not os.environ.get("JOIN_TEST_KEEP_GOING"):
            sys.exit(1)
    dist.destroy_process_group()


def fail_rank(rank, world, folder, phase):
    """Rank 1 raises in its loop, and lives on; the others must fail within the timeout."""
    init(rank, world, folder, 5)
    ddp = DistributedDataParallel(new_model(CASES[0]))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    start = time.monotonic()
    try:
        with Join([ddp, zero]):
            for i in range(2 if rank == 0 else 6):
                loss = ddp(torch.ones(4, 6, dtype=torch.float64)).sum()
                if (rank, i, phase) == (1, 3, "forward"):
                    raise ValueError("bad batch")
                loss.backward()
                if (rank, i, phase) == (1, 3, "backward"):
                    raise ValueError("bad batch")
                zero.step()
                if (rank, i, phase) == (1, 3, "step"):
                    raise ValueError("bad batch")
    except Exception as error:
        seconds = time.monotonic() - start
        text = f"{type(error).__name__} {getattr(error, '__notes__', '')}"
        with open(f"{folder}/{rank}", "w") as file:
            file.write(f"{seconds} {text}")
        if rank == 1:
            time.sleep(9)  # It lives longer than the timeout.
    os._exit(0)


def check_failure(world, phase):
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            fail_rank, (world, folder, phase), nprocs=world, start_method="fork"
        )
        for rank in range(world):
            with open(f"{folder}/{rank}") as file:
                seconds, text = file.read().split(" ", 1)
            print(f"world {world}  rank 1 raises after {phase}: rank {rank}: "
                  f"{float(seconds):.1f} s {text}")
            assert float(seconds) < 9, "later than the timeout"
            assert rank == 1 or "rank 1: ValueError: bad batch" in text, text


def check_empty_gradients():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(0, 3))
    used.grad = torch.ones(2)
    digest = join._digest([used, unused])
    unused.grad = torch.ones(0, 3)
    assert digest == join._digest([used, unused]), "a gradient without elements differs from none"


def main():
    wanted = os.environ.get("JOIN_TEST_CASE", "")
    check_empty_gradients()
    for world in map(int, sys.argv[1:] or (2, 3, 4)):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(
                run_rank, (world, folder, wanted), nprocs=world, start_method="fork"
            )
    if not wanted:
        for phase in ("forward", "backward", "step"):
            check_failure(3, phase)
    print("PASS")


if __name__ == "__main__":
    main()
