"""Compares training under Join with one float64 process that adds the gradients of all ranks.

    OMP_NUM_THREADS=1 python join_test.py [world sizes, default 2 3 4]

JOIN_TEST_BACKEND names another c10d backend than gloo. JOIN_TEST_TORCH=1 runs torch's own Join.
"""

import copy
import dataclasses
import datetime
import functools
import io
import os
import sys
import tempfile
import time
import traceback
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

try:
    from evenkeel_c10d import Join
except ImportError:
    from join import Join

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
    for wrong, kind in (([], ValueError), ([object()], TypeError)):
        try:
            Join(wrong)
        except kind:
            continue
        raise AssertionError(f"{wrong} was accepted")


def check_zero_alone(rank, world):
    """Without DDP each step is announced; the source's gradients are used."""
    model = torch.nn.Linear(3, 2).double()
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    with Join([zero]):
        for i in range(1 + rank):
            for p in model.parameters():
                p.grad = torch.full_like(p, 2.0**-i)
            zero.step()
    expected = 1 - sum(2.0**-i for i in range(world))
    for p in model.parameters():
        assert (p - expected).abs().max() < 1e-12, (rank, p, expected)


def check_subgroup(rank, world):
    """In a group, ranks are not those of the world."""
    if world > 2:
        group = dist.new_group(range(1, world))
        if rank > 0:
            for case in (CASES[0], CASES[5]):
                assert difference(case, rank - 1, world - 1, group) <= BOUND


CHECKS = [check_custom_joinable, check_throw, check_disabled_and_copied, check_arguments,
          check_zero_alone, check_subgroup]


def init(rank, world, folder, seconds):
    dist.init_process_group(BACKEND, f"file://{folder}/init", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=seconds))


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
        mp.spawn(fail_rank, (world, folder, phase), nprocs=world)
        for rank in range(world):
            with open(f"{folder}/{rank}") as file:
                seconds, text = file.read().split(" ", 1)
            print(f"world {world}  rank 1 raises after {phase}: rank {rank}: "
                  f"{float(seconds):.1f} s {text}")
            assert float(seconds) < 9, "later than the timeout"
            assert rank == 1 or "rank 1: ValueError: bad batch" in text, text


def main():
    wanted = os.environ.get("JOIN_TEST_CASE", "")
    for world in map(int, sys.argv[1:] or (2, 3, 4)):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (world, folder, wanted), nprocs=world)
    if not wanted:
        for phase in ("forward", "backward", "step"):
            check_failure(3, phase)
    print("PASS")


if __name__ == "__main__":
    main()
