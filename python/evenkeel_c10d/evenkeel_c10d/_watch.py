"""watch: who makes the others wait in a job of DistributedDataParallel on the CPU, on any backend.

    job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)     # on all ranks, after ddp is made
    for batch in job.input(loader):
        optimizer.zero_grad()
        loss(ddp(batch)).backward()
        optimizer.step()
        with job.phase("saving"):
            save()
    print(job.table())
    job.close()

The gradients stay with the backend of the process group (gloo, evenkeel, ...). evenkeel adds a
connection of each rank to rank 0, for messages of a few dozen bytes. Each rank measures how long it
was busy between two reductions, and in which phase; from the times of all ranks each one knows
which rank made the others wait.

What is reported, as warnings of the logger "evenkeel_c10d":

- "rank 3 cost the group 18 % of the last 500 steps: input", once, when a delay persists (rank 0).
- A rank that is missing: when ranks have waited in one collective for `hang_after` seconds, the
  lowest of them says where every rank is, and each rank that they wait for logs its own stack.
- A rank that was lost, or whose program ended with an exception (every rank).

Phases:  forward and backward are measured by hooks of the module, the optimizer's by hooks of
         `step`. Mark the rest with `input` and `phase`; unmarked time is "outside of the step", and
         so is evaluation (forward passes in evaluation mode without gradients). Waits in the
         module's reduction, and in `wait` of any collective's work, are not busy time.
Threads: one thread trains: the one that calls `watch`. A thread of Python reports.
Limits:  modules on a GPU are refused: their host does not wait for a reduction. Ranks that take
         part in different numbers of reductions (Join) are compared until the first one ends. A
         module that is pickled while it is watched needs this package where it is loaded.
"""

import contextlib
import datetime
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from . import _at_exit, _bridge, _innermost_of_program, _reason_of_exit

_PHASES = ("outside", "input", "forward", "backward", "optimizer", "saving")
_OUTSIDE, _INPUT, _FORWARD, _BACKWARD, _OPTIMIZER, _SAVING = range(len(_PHASES))

_CONNECT_TIMEOUT = datetime.timedelta(minutes=5)
_POLL = 0.25  # Seconds between two looks of the reporting thread.
_REPLY = 2.0  # Seconds within which a rank tells where it is.

_logger = logging.getLogger("evenkeel_c10d")
_watches = []  # Those that count the waits of their threads.
_originals = {}  # The functions that are replaced while a job is watched.


@contextlib.contextmanager
def _counted(watches):
    for one in watches:
        one._begin_wait()
    try:
        yield
    finally:
        for one in watches:
            one._end_wait()


def _counting(name):
    """Returns a method that counts as a wait of its thread what the method `name` takes."""

    def method(self, *args, **kwargs):
        thread = threading.get_ident()
        with _counted([one for one in _watches if one._thread == thread]):
            return _originals[name](self, *args, **kwargs)

    return method


# Before and after its forward pass a DistributedDataParallel receives rank 0's buffers and buckets,
# in C++ and without Work.wait.
_REPLACEMENTS = [
    (owner, name, _counting(name))
    for owner, name in (
        (dist.Work, "wait"),
        (DistributedDataParallel, "_pre_forward"),
        (DistributedDataParallel, "_sync_buffers"),
    )
]


def _replace():
    for owner, name, function in _REPLACEMENTS:
        _originals[name] = getattr(owner, name)
        setattr(owner, name, function)


def _restore():
    for owner, name, function in _REPLACEMENTS:
        if getattr(owner, name) is function:  # Else somebody else has replaced it, and calls it.
            setattr(owner, name, _originals[name])


def _leaves(output):
    """Yields what is in lists, tuples, dicts, and in the attributes of objects."""
    if isinstance(output, torch.Tensor):  # The usual case, without the cost of the others.
        yield output
        return
    for one in _pytree.tree_leaves(output):
        if isinstance(one, torch.Tensor):
            yield one
        elif hasattr(one, "__dict__"):
            yield from _pytree.tree_leaves(vars(one))


class _Hook:
    """A method of a Watch, for those that outlive it; in copies of a module it does nothing."""

    def __init__(self, watch=None, name=""):
        self._watch = (lambda: None) if watch is None else weakref.ref(watch)
        self._name = name

    def __call__(self, *args):
        watch = self._watch()
        return None if watch is None else getattr(watch, self._name)(*args)

    def __deepcopy__(self, memo):
        return _Hook()

    def __reduce__(self):
        return _Hook, ()


def _rank_list(ranks):
    ranks = sorted(ranks)
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(map(str, ranks))


class Watch:
    """What `watch` returns. All ranks have the same table and stragglers, within a second."""

    def __init__(self, model, optimizer=None, *, hang_after=60.0):
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"evenkeel: watch needs a DistributedDataParallel and got {type(model).__name__}."
            )
        if not hang_after > 0:
            raise ValueError(f"evenkeel: hang_after is {hang_after} seconds, and must be positive.")
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            raise NotImplementedError(
                "evenkeel: watch measures the host, and the module has parameters on a GPU, whose "
                "host does not wait for a reduction."
            )
        if optimizer is not None and not hasattr(optimizer, "register_step_pre_hook"):
            raise TypeError(
                f"evenkeel: watch needs a torch.optim.Optimizer and got {type(optimizer).__name__}."
            )
        group = model.process_group
        self._group = group
        self._sampler = None  # A BalancedSampler.
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._hang_after = hang_after
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._monitor = _bridge.StepMonitor(
            store=dist.distributed_c10d._world.pg_map[group][1],
            rank=self.rank,
            ranks=dist.get_process_group_ranks(group),
            timeout=_CONNECT_TIMEOUT,
            name=group.group_name,
        )
        self._waits = 0  # The depth of waits of the training thread,
        self._waits_since = None  # and when the outermost began.
        self._phase_before = _OUTSIDE  # The forward pass.
        self._will_reduce = False  # The next backward pass reduces.
        self._is_queued = False  # Its end will be seen.
        self._gradients = None  # Before it.
        self._is_blind = False  # The outputs hide their tensors.
        self._is_closed = threading.Event()
        self._removers = []
        self._attach(model, optimizer)
        self._hosts = {self.rank: socket.gethostname()}
        self._states = {}  # By rank, where it was at a time.
        self._left = {}  # By rank, the steps after which it has closed its watch.
        self._monitor.tell(json.dumps({"host": self._hosts[self.rank]}))
        self._reporter = threading.Thread(target=self._report, name="evenkeel watch", daemon=True)
        self._reporter.start()
        self._cancel_at_exit = _at_exit(self, _Hook(self, "_close_at_exit"))

    # ---- What a loop uses ----

    def input(self, loader):
        """Yields what `loader` yields, and counts the time until it does as input."""
        batches = iter(loader)
        while True:
            with self.phase("input"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    @contextlib.contextmanager
    def phase(self, name):
        """Counts the time of a block as this phase: outside, input, forward, ..., saving."""
        if name not in _PHASES:
            raise ValueError(f"evenkeel: there is no phase {name!r}, only {', '.join(_PHASES)}.")
        before = self._monitor.enter(_PHASES.index(name))
        try:
            yield
        finally:
            self._monitor.enter(before)

    def weight(self, n=None):
        """Returns the factor by which to multiply the next batch's loss, a mean over `n` units.

        The gradient is then that of the mean over the units of all ranks. Without `n`, a unit is a
        sample. Pass `n` for other units, such as the tokens with labels != ignore_index: the call
        then waits for the numbers of all ranks, so call it before the forward pass. A mean over no
        unit is NaN, also times 0: where that can happen, multiply the sum over the units by
        `job.weight(n) / max(n, 1)`.
        Call it once for each batch of the job's BalancedSampler, in their order.
        """
        if self._sampler is None:
            raise RuntimeError("evenkeel: weight() needs a BalancedSampler of this job.")
        return self._sampler._weight(n)

    def stragglers(self):
        """Returns (rank, fraction of the time that it cost the group, phase) of the recent steps."""
        return [(rank, cost, _PHASES[phase]) for rank, cost, phase in self._monitor.stragglers()]

    def table(self):
        """Returns a text with a line per rank: its cost, and the milliseconds of a step by phase."""
        return self._monitor.table()

    def close(self):
        """Removes the hooks, and leaves the other ranks.

        Only rank 0, which connects them, waits for the others, for 5 seconds at most.
        """
        self._end(why="")

    # ---- For a BalancedSampler ----

    def _share(self, sampler, **options):
        self._monitor.begin_sharing(**options)
        self._sampler = sampler

    def _divide(self, step, samples):
        return self._monitor.divide(step, samples)

    # ---- The hooks ----

    def _attach(self, model, optimizer):
        def add(register, method, **options):
            self._removers.append(register(_Hook(self, method.__name__), **options).remove)

        add(model.register_forward_pre_hook, self._before_forward, prepend=True)
        add(model.register_forward_hook, self._after_forward)
        self._parameters = list(model.parameters())
        self._probe = self._parameters[-1]  # One that had a gradient in the last step.
        if optimizer is not None:
            add(optimizer.register_step_pre_hook, self._before_step)
            add(optimizer.register_step_post_hook, self._after_step)
        if not _watches:
            _replace()
        _watches.append(self)

    def _before_forward(self, module, _args):
        self._end_waits()  # Those of a backward pass that an exception has ended.
        self._is_queued = False
        # Evaluation is no part of a step.
        is_of_step = module.training or torch.is_grad_enabled()
        self._phase_before = self._monitor.enter(_FORWARD if is_of_step else _OUTSIDE)

    def _after_forward(self, model, _args, output):
        if not torch.is_grad_enabled():
            self._monitor.enter(self._phase_before)
            return
        self._will_reduce = model.require_backward_grad_sync
        tensors = [one for one in _leaves(output) if getattr(one, "grad_fn", None) is not None]
        for tensor in tensors:
            tensor.register_hook(_Hook(self, "_on_backward"))
        if not tensors and not self._is_blind:
            self._is_blind = True
            _logger.warning(
                "rank %d: no tensor is found in the outputs of the module (%s), so its steps are not "
                "seen: return tensors, or lists, tuples, dicts or objects of them.",
                self.rank, type(output).__name__,
            )  # fmt: skip

    def _on_backward(self, _gradient):
        """A backward pass has reached an output of the module."""
        if self._is_queued or self._is_closed.is_set():
            return
        self._is_queued = True
        self._gradients = self._versions()
        self._monitor.begin_backward()
        # Before that of DistributedDataParallel, which is queued with the last gradient and waits
        # for the reduction.
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _versions(self):
        """Returns what differs once a gradient has been accumulated; None if there are no gradients.

        Mostly there are none, and one look is enough; a hook would be called for each parameter.
        """
        if self._probe.grad is None:
            return None
        gradients = [parameter.grad for parameter in self._parameters]
        return [one if one is None else (one.data_ptr(), one._version) for one in gradients]

    def _has_accumulated(self):
        """Returns whether the backward pass that ends has reached a parameter."""
        if self._gradients is not None:
            return self._gradients != self._versions()
        for parameter in (self._probe, *self._parameters):
            if parameter.grad is not None:
                self._probe = parameter
                return True
        return False

    def _after_backward(self):
        self._is_queued = False
        if self._is_closed.is_set():  # In the middle of this pass.
            return
        if not self._has_accumulated():  # autograd.grad(): not for the parameters.
            self._monitor.enter(_FORWARD)
            return
        if not self._will_reduce:
            self._monitor.enter(_OUTSIDE)
            return
        self._will_reduce = False
        if self._sampler is not None:
            self._sampler._before_reduction(self._monitor.steps + 1)
        self._begin_wait()
        torch.autograd.Variable._execution_engine.queue_callback(self._after_reduction)

    def _after_reduction(self):
        self._end_wait()
        self._monitor.end_reduction()

    def _before_step(self, _optimizer, _args, _kwargs):
        self._monitor.enter(_OPTIMIZER)

    def _after_step(self, _optimizer, _args, _kwargs):
        self._monitor.enter(_OUTSIDE)

    def _begin_wait(self):
        if self._waits == 0:
            self._waits_since = time.monotonic()
        self._waits += 1
        self._monitor.begin_wait()

    def _end_wait(self):
        if self._waits == 0:  # _end_waits() has ended it.
            return
        self._waits -= 1
        if self._waits == 0:
            self._waits_since = None
        self._monitor.end_wait()

    def _end_waits(self):
        while self._waits > 0:
            self._end_wait()

    # ---- The reports ----

    def _report(self):
        was_lost = False
        told = 0.0
        reported = None  # The wait, or the step, that was reported last.
        late = None  # The step in which others wait for this rank, and since when.
        while not self._is_closed.wait(_POLL):
            now = time.monotonic()
            is_asked = self._take_messages(now)
            news = self._monitor.take_news()
            if news and self.rank == 0:
                _logger.warning("%s%s", news, self._hosts_of_stragglers())
            shares = self._monitor.take_share_news()
            if shares and self.rank == 0:
                _logger.warning("%s", shares)
            message, _ranks = self._monitor.failure()
            # Rank 0 connects the ranks: without it there is no news, and no loss either.
            if message and not was_lost and 0 not in self._left:
                was_lost = True
                _logger.warning("rank %d: %s", self.rank, message)
            since = self._waits_since
            waited = 0.0 if since is None else now - since
            is_hanging = waited >= self._hang_after
            if (is_hanging or is_asked) and now - told >= 1:
                told = now
                state = self._where(waited)
                self._states[self.rank] = (now, state)
                self._monitor.tell(json.dumps({**state, "asks": is_hanging}))
            if waited >= self._hang_after + _REPLY and reported != since:
                reported = since
                self._report_hang(now, waited)
            # Ranks neither come to a collective nor leave it at the same moment. One that waits,
            # too, is not late; nor is one whose collective ended while the question travelled.
            if is_asked and waited >= self._hang_after / 4:
                late = None
            elif is_asked and (late is None or late[0] != self._monitor.steps):
                late = self._monitor.steps, now
            elif is_asked and now - late[1] >= 1 and reported != late[0]:
                reported = late[0]
                self._report_stack()

    def _take_messages(self, now):
        """Returns whether a rank that waits asks where the others are."""
        is_asked = False
        for rank, text in self._monitor.take_messages():
            said = json.loads(text)
            if "host" in said:
                self._hosts[rank] = said["host"]
            elif "left" in said:
                self._left[rank] = said["left"]
            else:
                self._states[rank] = (now, said)
                is_asked |= said["asks"]
        return is_asked

    def _hosts_of_stragglers(self):
        if len(set(self._hosts.values())) == 1:
            return ""
        ranks = [rank for rank, _cost, _phase in self._monitor.stragglers()]
        return f" ({', '.join(f'rank {rank} on {self._hosts.get(rank)}' for rank in ranks)})"

    def _where(self, waited):
        """Returns where the training thread is: its steps, how long it has waited, and a text."""
        frame = sys._current_frames().get(self._thread)
        frames = traceback.extract_stack(frame) if frame is not None else []
        state = {"steps": self._monitor.steps, "waited": waited, "place": "no code: it has ended"}
        own = _innermost_of_program(frames)
        if own:
            called = frames[frames.index(own) + 1 :]
            line = f"{os.path.basename(own.filename)}:{own.lineno}"
            # The function that the program called: all_reduce, backward, forward ...
            hidden = ("_", "inner", "wrapper", "decorate_context")
            names = [one.name for one in called if not one.name.startswith(hidden)]
            state["place"] = f"{names[0] if names else own.name} ({line})"
        return state

    def _report_hang(self, now, waited):
        """Says where all ranks are, on the lowest of those that have waited for long."""
        recent = {
            rank: state for rank, (at, state) in self._states.items() if now - at < 2 * _REPLY
        }
        if self.rank != min(r for r, s in recent.items() if s["waited"] >= self._hang_after):
            return
        texts = {}
        for rank in range(self.world_size):
            if rank in recent:
                verb = "waits" if recent[rank]["waited"] >= 1 else "is"
                text = f"{verb} in {recent[rank]['place']}, after {recent[rank]['steps']} steps"
            elif rank in self._left:
                text = f"has closed its watch, after {self._left[rank]} steps"
            else:
                text = "does not respond (its process is stopped, or its thread holds the GIL)"
            texts.setdefault(text, []).append(rank)
        # Those for whom the others wait come first.
        texts = sorted(texts.items(), key=lambda item: item[0].startswith("waits"))
        said = "; ".join(f"{_rank_list(ranks)} {text}" for text, ranks in texts)
        _logger.warning("a collective has not ended for %.0f s: %s", waited, said)

    def _report_stack(self):
        frame = sys._current_frames().get(self._thread)
        if frame is not None:
            stack = "".join(traceback.format_stack(frame))
            _logger.warning("rank %d: other ranks wait for this one; it is here:\n%s", self.rank, stack)

    # ---- The end ----

    def _close_at_exit(self):
        self._end(_reason_of_exit())

    def _end(self, why):
        if self._is_closed.is_set() or os.getpid() != self._pid:
            return
        self._is_closed.set()
        self._sampler = None
        self._cancel_at_exit()
        _watches.remove(self)
        if not _watches:
            _restore()
        for remove in self._removers:
            remove()
        self._removers.clear()
        self._parameters, self._probe = [], None
        if threading.get_ident() == self._thread:
            self._end_waits()
        self._reporter.join()
        try:
            if why:
                self._monitor.abort(why)
            else:
                self._monitor.tell(json.dumps({"left": self._monitor.steps}))
        finally:
            self._monitor.leave()


def watch(model, optimizer=None, *, hang_after=60.0):
    """Begins to watch a job. All ranks of the module's process group must call it.

    Args:
        model: the DistributedDataParallel.
        optimizer: the torch.optim.Optimizer whose `step` is the phase "optimizer".
        hang_after: the seconds without a step after which a rank that waits reports it.
    """
    return Watch(model, optimizer, hang_after=hang_after)
