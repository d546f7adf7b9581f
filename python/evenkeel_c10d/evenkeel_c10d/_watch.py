"""watch: who makes the others wait in a job of DistributedDataParallel, on any backend.

    job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)     # on all ranks, after ddp is made
    for batch in job.input(loader):
        optimizer.zero_grad()
        loss(ddp(batch)).backward()
        optimizer.step()
        with job.phase("saving"):
            save()
    print(job.table())
    job.close()

The gradients stay with the backend of the process group (gloo, nccl, ...). evenkeel adds a
connection per rank to rank 0, for messages of a few dozen bytes. Each rank measures how long it was
busy between two reductions, and in which phase; from the times of all ranks each one knows which
rank made the others wait.

What is reported, as warnings of the logger "evenkeel_c10d":

- "rank 3 cost the group 18 % of the last 500 steps: input", once, when a delay persists (rank 0).
- A rank that is missing: when a rank has waited in a collective for `hang_after` seconds without a
  step, the lowest rank that waits says where every rank is, and each rank that keeps the others
  waiting logs its own stack.
- A rank that was lost, or whose program ended with an exception (every rank).

Phases:  forward and backward are measured by hooks of the module, the optimizer's by hooks of
         `step`. Mark the rest with `input` and `phase`; unmarked time is "outside of the step".
         Waits in the module's reduction, and in `wait` of any collective's work, are not busy time.
Threads: one thread trains: the one that calls `watch`. A thread of Python reports.
Limits:  times are those of the host, so that a slow device is not seen. Ranks that take part in
         different numbers of reductions (Join) are compared until the first one ends.
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

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from . import _at_exit, _bridge, _reason_of_exit

_PHASES = ("outside", "input", "forward", "backward", "optimizer", "saving")
_OUTSIDE, _INPUT, _FORWARD, _BACKWARD, _OPTIMIZER, _SAVING = range(len(_PHASES))

_CONNECT_TIMEOUT = datetime.timedelta(minutes=5)
_POLL = 0.25  # Seconds between two looks of the reporting thread.
_REPLY = 2.0  # Seconds within which a rank tells where it is.

_logger = logging.getLogger("evenkeel_c10d")
_watches = []  # Those that count the waits of their threads.
_wait_of_torch = dist.Work.wait


def _counted_wait(work, *args, **kwargs):
    """Replaces Work.wait while a job is watched."""
    waiting = [one for one in _watches if one._thread == threading.get_ident()]
    for one in waiting:
        one._begin_wait()
    try:
        return _wait_of_torch(work, *args, **kwargs)
    finally:
        for one in waiting:
            one._end_wait()


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
        group = model.process_group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._hang_after = hang_after
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._monitor = _bridge.StepMonitor(
            store=dist.distributed_c10d._world.pg_map[group][1],
            rank=self.rank,
            world_size=self.world_size,
            timeout=_CONNECT_TIMEOUT,
            name="watch",
        )
        self._waits = 0  # The depth of waits of the training thread.
        self._is_reducing = False  # Its backward pass waits for the reduction.
        self._is_closed = threading.Event()
        self._removers = []
        self._attach(model, optimizer)
        self._hosts = {self.rank: socket.gethostname()}
        self._states = {}  # By rank, where it was at a time.
        self._monitor.tell(json.dumps({"host": self._hosts[self.rank]}))
        self._reporter = threading.Thread(target=self._report, name="evenkeel watch", daemon=True)
        self._reporter.start()
        _at_exit(self, self._close_at_exit)

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

    def stragglers(self):
        """Returns (rank, fraction of the time that it cost the group, phase) of the last 500 steps."""
        return [(rank, cost, _PHASES[phase]) for rank, cost, phase in self._monitor.stragglers()]

    def table(self):
        """Returns a text with a line per rank: its cost, and the milliseconds of a step by phase."""
        return self._monitor.table()

    def close(self):
        """Removes the hooks and leaves the other ranks, without waiting for them."""
        self._end(why="")

    # ---- The hooks ----

    def _attach(self, model, optimizer):
        add = self._removers.append
        add(model.register_forward_pre_hook(self._before_forward, prepend=True).remove)
        add(model.register_forward_hook(self._after_forward).remove)
        # Rank 0's buffers come in C++, where no Work is waited for.
        sync_buffers = model._sync_buffers

        def sync_buffers_counted():
            self._begin_wait()
            try:
                sync_buffers()
            finally:
                self._end_wait()

        model._sync_buffers = sync_buffers_counted
        add(lambda: model.__dict__.pop("_sync_buffers", None))
        if optimizer is not None:
            add(optimizer.register_step_pre_hook(self._before_step).remove)
            add(optimizer.register_step_post_hook(self._after_step).remove)
        if not _watches:
            dist.Work.wait = _counted_wait
        _watches.append(self)

    def _before_forward(self, _module, _args):
        self._monitor.enter(_FORWARD)

    def _after_forward(self, model, _args, output):
        if not torch.is_grad_enabled():
            self._monitor.enter(_OUTSIDE)
            return
        pass_ = _Pass(self, will_reduce=model.require_backward_grad_sync)
        for tensor in _pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(pass_.begin)

    def _before_step(self, _optimizer, _args, _kwargs):
        self._monitor.enter(_OPTIMIZER)

    def _after_step(self, _optimizer, _args, _kwargs):
        self._monitor.enter(_OUTSIDE)

    def _begin_wait(self):
        self._waits += 1
        self._monitor.begin_wait()

    def _end_wait(self):
        self._waits -= 1
        self._monitor.end_wait()

    # ---- The reports ----

    def _report(self):
        progress = _Progress(self._monitor.steps)
        was_lost = False
        while not self._is_closed.wait(_POLL):
            now = time.monotonic()
            for rank, text in self._monitor.take_messages():
                said = json.loads(text)
                if "host" in said:
                    self._hosts[rank] = said["host"]
                else:
                    self._states[rank] = (now, said)
            news = self._monitor.take_news()
            if news and self.rank == 0:
                _logger.warning("%s%s", news, self._hosts_of_stragglers())
            message, _ranks = self._monitor.failure()
            if message and not was_lost:
                was_lost = True
                _logger.warning("rank %d: %s", self.rank, message)
            progress.see(self._monitor.steps, now)
            stalled = now - progress.since
            if stalled >= self._hang_after and progress.may_tell(now):
                state = self._where()
                self._states[self.rank] = (now, state)
                self._monitor.tell(json.dumps(state))
            if stalled >= self._hang_after + _REPLY and not progress.is_reported:
                progress.is_reported = self._report_hang(now, stalled)

    def _hosts_of_stragglers(self):
        if len(set(self._hosts.values())) == 1:
            return ""
        ranks = [rank for rank, _cost, _phase in self._monitor.stragglers()]
        return f" ({', '.join(f'rank {rank} on {self._hosts.get(rank)}' for rank in ranks)})"

    def _where(self):
        """Returns where the training thread is: its step, whether it waits for others, and a text."""
        frame = sys._current_frames().get(self._thread)
        frames = traceback.extract_stack(frame) if frame is not None else []
        state = {"step": self._monitor.steps, "waits": self._waits > 0, "text": "has ended"}
        inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
        own = [one for one in frames if not one.filename.startswith(inside)]
        if own:
            called = frames[frames.index(own[-1]) + 1 :]
            place = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}"
            # The function that the program called: all_reduce, backward, forward ...
            hidden = ("_", "inner", "wrapper", "decorate_context")
            names = [one.name for one in called if not one.name.startswith(hidden)]
            state["text"] = f"{names[0]} ({place})" if names else f"{own[-1].name} ({place})"
        return state

    def _report_hang(self, now, stalled):
        """Says who is missing. Returns whether there was something to say, on this rank."""
        recent = {
            rank: state
            for rank, (at, state) in self._states.items()
            if now - at < self._hang_after + 2 * _REPLY
        }
        waiting = [rank for rank, state in recent.items() if state["waits"]]
        if not waiting:
            return False
        if not recent[self.rank]["waits"]:
            stack = traceback.format_stack(sys._current_frames().get(self._thread))
            _logger.warning(
                "rank %d: other ranks have waited for this one for %.0f s; it is here:\n%s",
                self.rank, stalled, "".join(stack),
            )  # fmt: skip
            return True
        if self.rank != min(waiting):
            return True
        texts = {}
        for rank in range(self.world_size):
            if rank not in recent:
                text = "does not respond (its process is stopped, or its thread holds the GIL)"
            else:
                state = recent[rank]
                verb = "waits" if state["waits"] else "is"
                text = f"{verb} in {state['text']}, after {state['step']} steps"
            texts.setdefault(text, []).append(rank)
        # Those who keep the others waiting come first.
        texts = sorted(texts.items(), key=lambda item: item[0].startswith("waits"))
        _logger.warning(
            "no step for %.0f s: %s",
            stalled, "; ".join(f"{_rank_list(ranks)} {text}" for text, ranks in texts),
        )  # fmt: skip
        return True

    # ---- The end ----

    def _close_at_exit(self):
        self._end(_reason_of_exit())

    def _end(self, why):
        if self._is_closed.is_set() or os.getpid() != self._pid:
            return
        self._is_closed.set()
        _watches.remove(self)
        if not _watches:
            dist.Work.wait = _wait_of_torch
        for remove in self._removers:
            remove()
        self._removers.clear()
        if threading.current_thread() is not self._reporter:
            self._reporter.join()
        if why:
            self._monitor.abort(why)
        self._monitor.leave()


class _Pass:
    """One forward pass: sees when its backward pass begins, and when its reduction ends."""

    def __init__(self, watch, will_reduce):
        self._watch = watch
        self._will_reduce = will_reduce
        self._has_begun = False

    def begin(self, _gradient):
        if self._has_begun or self._watch._is_closed.is_set():
            return
        self._has_begun = True
        self._watch._monitor.begin_backward()
        # Before that of DistributedDataParallel, which is queued with the last gradient and waits
        # for the reduction.
        torch.autograd.Variable._execution_engine.queue_callback(self._before_reduction)

    def _before_reduction(self):
        if not self._will_reduce:
            self._watch._monitor.enter(_OUTSIDE)
            return
        if self._watch._is_reducing:  # An exception has ended the last one.
            self._watch._end_wait()
        self._watch._is_reducing = True
        self._watch._begin_wait()
        torch.autograd.Variable._execution_engine.queue_callback(self._after_reduction)

    def _after_reduction(self):
        self._watch._is_reducing = False
        self._watch._end_wait()
        self._watch._monitor.end_reduction()


class _Progress:
    """When this rank made its last step, and what was said since."""

    def __init__(self, steps):
        self.steps = steps
        self.since = time.monotonic()
        self.is_reported = False
        self._told = 0.0

    def see(self, steps, now):
        if steps != self.steps:
            self.__init__(steps)
            self.since = now

    def may_tell(self, now):
        """Returns whether a second has passed since the last time."""
        if now - self._told < 1:
            return False
        self._told = now
        return True


def watch(model, optimizer=None, *, hang_after=60.0):
    """Begins to watch a job. All ranks of the module's process group must call it.

    Args:
        model: the DistributedDataParallel.
        optimizer: the torch.optim.Optimizer whose `step` is the phase "optimizer".
        hang_after: the seconds without a step after which a rank that waits reports it.
    """
    return Watch(model, optimizer, hang_after=hang_after)
