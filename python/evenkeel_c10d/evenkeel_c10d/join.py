"""Join: training with uneven inputs that is exact with sharded optimizers.

    from evenkeel_c10d import Join
    with Join([ddp, zero]):            # or Join([ddp, optimizer, scheduler])
        for batch in loader:           # The ranks may have different numbers of batches, or none.
            zero.zero_grad()
            loss(ddp(batch)).backward()
            zero.step()

It replaces `torch.distributed.algorithms.join.Join` on any c10d backend: same arguments, same
place. A rank whose inputs have run out (an exhausted rank) shadows the collectives of the others.
At the end all ranks have the weights and the optimizer state that one process gets that adds the
gradients of all ranks, divided by the initial world size (`divide_by_initial_world_size=False`: by
the number of ranks that still have input).

What differs from torch's:

- A backward pass is announced when it begins, a forward pass only if it exchanges buffers. So the
  models of a loop (GANs, twin critics) may have any number of forward passes per backward pass.
- ZeroRedundancyOptimizer: before a step that an exhausted rank shadows, an active rank sends it
  the weights, gradients and settings (learning rate ...) of its shard, as they are at the call of
  `step`, after clipping, unscaling and hooks. torch steps the shard with a stale gradient or none.
- Gradients that are kept from one synchronized backward pass to the next count once.
- Optimizers, schedulers, scalers and modules (anything with `state_dict` and `load_state_dict`)
  may be in the list: exhausted ranks get the state of a rank that trained to the end. Optimizers
  that the list lacks, if all their parameters are those of listed modules, their LRSchedulers,
  torch.amp.GradScaler and AveragedModel are found if only one object fits. Groups of parameters
  that are added meanwhile are added, too. Functions, schedulers, modules and what can be called
  and loaded stay the rank's own where a state holds them, and get the state of the others'.
- A gradient that an exhausted rank accumulated under `no_sync` is added to the next reduction, also
  if it is from before the context, unless the active ranks have cleared theirs; torch drops it.
- `find_unused_parameters`, `static_graph` and forward passes without gradients are shadowed
  exactly: a parameter that no active rank uses keeps its gradient (or None).
- The program's own all_reduce, reduce, broadcast and barrier in the loop are shadowed: an exhausted
  rank contributes nothing, and an average is that of the active ranks. Where that cannot be (it
  is the source; it would have to contribute, as in all_gather or a sum of weights), all ranks
  raise RuntimeError. Amid the reductions of a backward pass the active ranks raise it.
- The context ends with the `with` block; torch's leaves its collectives enabled.
- One message per call carries what each rank does, and early termination. Different calls are
  reported with the ranks' numbers.

Order:   All ranks list the same objects in the same order. Active ranks make the same sequence of
         backward passes, steps and collectives of their own; forward passes, too, if the module
         has buffers that are broadcast. Two models that share one backward pass are reduced one
         after the other; where their reductions alternate all ranks raise (with a communication
         hook, the backend reports it). Messages (send, recv) with an exhausted rank are an error:
         all ranks raise it where the rank is known to be exhausted, else the backend reports it.
         Contexts may be nested if they have no joinable in common and the ranks have equal inputs.
Threads: One thread runs the loop; those of the autograd engine belong to it. Collectives that other
         threads call are not shadowed.
Errors:  With throw_on_early_termination all ranks raise RuntimeError in the same forward pass. What
         one rank alone notices of states, groups of parameters, closures and static graphs, all
         ranks raise. An exception in the loop of one rank passes through at once and is recorded in
         the c10d store. It cannot complete the collectives in which the other ranks wait: these
         fail when the connection closes, at the latest after the group's timeout, and their
         exception then has a note that names the first failure. So it is, too, with a collective
         that the program calls amid the reductions of a backward pass. The group must not be used
         afterwards.
Trust:   Settings and states travel pickled inside the group, as in `broadcast_object_list`.
Limits:  The code of the loop does not run on an exhausted rank: its counters, its own averages
         without `state_dict`, and what only some ranks do are behind. Gradients that are kept over
         a `no_sync` pass that follows a synchronized one, and `step(closure)` of a
         ZeroRedundancyOptimizer, raise RuntimeError. `delay_all_reduce_named_params`,
         `skip_all_reduce_unused_params`, sparse gradients and the Python reducer are not
         supported, nor are buffer hooks that run after the forward pass; others run on exhausted
         ranks, too. A stateful communication hook (PowerSGD) sees zeros there. A sum of a copy of
         the weights lacks those of exhausted ranks. With `broadcast_buffers=False` each rank keeps
         buffers of its own, as without Join. With static_graph a rank without any input in the
         first context cannot use the module afterwards.
"""

import collections
import contextlib
import functools
import pickle
import sys
import threading
import warnings
import zlib

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join as torch_join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _join_calls, _join_states

__all__ = ["Join"]

# Rank states in the table that all ranks exchange before each call. An active rank sends
# _ACTIVE + kind + 8 * joinable, and the kind's detail.
_FAILED, _JUST_EXHAUSTED, _EXHAUSTED, _ACTIVE = range(4)
_ENTRY, _CALL, _FORWARD, _BACKWARD, _COLLECTIVE = range(5)
_NAMES = ("the entry of", "a call of", "a forward pass of", "a backward pass of")
# Details of a forward pass, and of a backward pass.
_SYNCS, _HAS_GRAD = 1, 2
_KEPT, _MIXED, _CLEARED = 1, 2, 4
_SKEW_WARNING = 1000
_contexts = collections.Counter()  # Contexts entered, by group name: the same on all ranks.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_APPLY = torch.autograd.function.BackwardCFunction.apply.__code__
# The functions of Joinables that call collectives after an announcement.
_ANNOUNCED = {
    DistributedDataParallel._pre_forward.__code__,
    DistributedDataParallel._post_forward.__code__,
    ZeroRedundancyOptimizer._sync_params.__code__,
}


class _Config:
    """Replaces torch's `_JoinConfig` in a Joinable while the context is open.

    Each Joinable calls torch's `Join.notify_join_context` before its collectives, which reads
    `is_first_joinable` once. The announcement is made there, so that torch adds no message.
    """

    enable = True  # In DistributedDataParallel: the forward pass has collectives to shadow.
    throw_on_early_termination = False

    def __init__(self, announce):
        self._announce = announce

    @property
    def is_first_joinable(self):
        self._announce(self, sys._getframe(2))
        return False

    def __reduce__(self):  # A copied or pickled Joinable is outside of the context.
        return torch_join._JoinConfig.construct_disabled_join_config, ()


class Join(torch_join.Join):
    """See the text of the module."""

    def __init__(self, joinables, enable=True, throw_on_early_termination=False, **kwargs):
        self._stateful = [j for j in joinables if not isinstance(j, torch_join.Joinable)]
        for other in self._stateful:
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise TypeError(
                    f"Join: {type(other).__name__} is not a Joinable and lacks state_dict() or "
                    "load_state_dict()"
                )
        own = [j for j in joinables if isinstance(j, torch_join.Joinable)]
        self._ddps = [j for j in own if isinstance(j, DistributedDataParallel)]
        self._zeros = [j for j in own if isinstance(j, ZeroRedundancyOptimizer)]
        for ddp in self._ddps:
            _check_supported(ddp)
        super().__init__(own, enable, throw_on_early_termination, **kwargs)
        self._clear()

    def _clear(self):
        self._is_shadowing = False
        self._is_internal = False  # The collectives that follow are of this class.
        self._frame = None  # The function that has announced the call of a user's Joinable.
        self._failure = None  # An error of this rank that all ranks raise with the next table.
        self._table = None  # One row per rank of the group: code and detail.
        self._pending_table = None  # The table in flight, and its work.
        self._reads_at_once = False  # A rank may refuse a forward pass, as all must know.
        self._count_work = {}  # The work that the reducer of a module takes its divisor from.
        self._handles = []  # Of hooks; removed at the end.
        self._groups = []  # The groups of these ranks, whose collectives are observed.
        # The state of modules. A synchronized forward pass makes the module expect a reduction.
        # `unsynced` has gradients of passes without one; `synced` was reduced in this context;
        # `mixed`: both. `carried` had gradients of its own when it entered, `cleared` no longer.
        self._expecting, self._unsynced, self._synced = set(), set(), set()
        self._mixed, self._carried, self._cleared = set(), set(), set()
        self._reduced = {}  # The parameters that a module reduces.
        self._begun = set()  # The modules of which the last forward pass is or has been reduced.
        self._last = None  # The module whose reduction began last.
        self._launched = 0  # The collectives of that reduction so far.
        self._is_reducing = False  # The running backward pass reduces listed modules.
        self._current = [None, -1]  # The module of the last gradient, and the graph task.

    def _set_joinable_configs(self):
        """Does nothing here; `__enter__` and `__exit__` set the configurations."""

    def __enter__(self):
        if not self._enable:
            return
        for index, joinable in enumerate(self._joinables):
            if isinstance(joinable._join_config, _Config):
                raise RuntimeError(f"Join: joinable {index} is in another context, which is open")
        self._clear()
        self._thread = threading.get_ident()
        _contexts[self._process_group.group_name] += 1
        try:
            self._enter()
        except BaseException:
            self._leave()
            raise

    def _enter(self):
        for ddp in self._ddps:
            self._enter_ddp(self._joinables.index(ddp), ddp)
        self._params = [p for ddp in self._ddps for p in ddp.module.parameters()]
        self._positions = {param: index for index, param in enumerate(self._params)}
        self._unlisted = _join_states.Unlisted(
            [*self._stateful, *self._zeros], [d.module for d in self._ddps], self._positions
        )
        self._handles.append(register_optimizer_step_post_hook(self._unlisted.note_step))
        for zero in self._zeros:  # While it steps its own shard, the table travels.
            after = functools.partial(self._after_local_step, zero)
            if not zero._overlap_with_ddp:
                self._handles.append(zero.optim.register_step_post_hook(after))
        for index, joinable in enumerate(self._joinables):
            if not getattr(joinable, "_overlap_with_ddp", False):  # It steps in DDP's hook.
                joinable._join_config = _Config(functools.partial(self._announce, index))
        ranks = dist.get_process_group_ranks(self._process_group)
        for group in dist.distributed_c10d._world.pg_map:
            if dist.get_process_group_ranks(group) == ranks:
                hook = functools.partial(self._before_collective, group)
                group.register_pre_hook(id(self), hook)
                self._groups.append(group)

    def _leave(self):
        for joinable in self._joinables:
            joinable._join_config = torch_join._JoinConfig.construct_disabled_join_config()
        for ddp, work in self._count_work.items():  # Divide by the world size again.
            ddp.reducer._set_forward_pass_work_handle(work, True)
        for handle in self._handles:
            handle.remove()
        for group in self._groups:
            group.unregister_pre_hook(id(self))

    def __exit__(self, exception_type, exception, traceback):
        if not self._enable:
            return
        try:
            if exception is None:
                self._is_shadowing = self._is_internal = True
                self._shadow()
            else:
                self._record(exception)
        except BaseException as error:
            self._record(error)
            raise
        finally:
            self._leave()

    def _enter_ddp(self, index, ddp):
        """Finds out whose gradients the module has, and observes its backward passes."""
        if ddp.reducer._rebuild_buckets():  # A collective, which else is in a forward pass.
            ddp._has_rebuilt_buckets = True
        params = self._reduced[ddp] = _params_of_reducer(ddp)
        self._exchange(_ENTRY, index, 2 * _digest(params) + _lacks_graph(ddp))
        rows = self._read()
        self._reads_at_once |= any(detail % 2 for _, detail in rows)
        details = [detail // 2 for _, detail in rows]
        if len(set(details)) > 1:
            if details[self._rank]:
                self._unsynced.add(ddp)
                self._carried.add(ddp)
        elif details[0]:
            self._synced.add(ddp)
        current, task = self._current, torch._C._current_graph_task_id

        def before(_):  # It runs for each parameter.
            if current[0] is not ddp or current[1] != task():
                current[:] = ddp, task()
                self._before_gradient(index, ddp)

        for param in params:  # The reducer keeps these nodes.
            was, param.requires_grad = param.requires_grad, True
            node = torch.autograd.graph.get_gradient_edge(param).node
            param.requires_grad = was
            self._handles.append(node.register_prehook(before))

    # The exchange of the table.

    def _exchange(self, kind, index=0, detail=0):
        """Starts the exchange of the table; `_read` waits for it."""
        self._send(_ACTIVE + kind + 8 * index, detail)

    def _send(self, code, detail=0):
        self._read()
        if self._failure is not None:
            code = _FAILED
        row = torch.tensor([code, detail], dtype=torch.int64, device=self._device)
        table = row.new_empty(2 * dist.get_world_size(self._process_group))
        with self._internal():
            group = self._process_group
            work = dist.all_gather_into_tensor(table, row, group=group, async_op=True)
        self._pending_table = table, work
        if code == _FAILED or self._reads_at_once:
            self._read()

    def _read(self):
        """Returns the rows of the last exchange."""
        if self._pending_table is not None:
            table, work = self._pending_table
            work.wait()
            values = table.tolist()
            self._table, self._pending_table = list(zip(values[::2], values[1::2])), None
            failed = [rank for rank, (code, _) in enumerate(self._table) if code == _FAILED]
            if failed:
                text = self._broadcast(lambda: _text_of(self._rank, self._failure), failed[0])
                raise RuntimeError(f"Join: {text}") from self._failure
            if len({_compared(*row) for row in self._table if row[0] >= _ACTIVE}) > 1:
                raise RuntimeError(f"Join: the ranks make different calls: {self._describe()}")
        return self._table

    def _describe(self):
        def call(code, detail):
            if code < _ACTIVE:
                return "no more input"
            index, kind = divmod(code - _ACTIVE, 8)
            if kind == _COLLECTIVE:
                return "a collective of the program"
            text = f"{_NAMES[kind]} {type(self._joinables[index]).__name__} (joinable {index})"
            if kind == _FORWARD:
                text += f" with{'' if detail & _HAS_GRAD else 'out'} gradients, "
                text += "synchronized" if detail & _SYNCS else "no_sync"
            elif kind == _BACKWARD:
                text += f" with{'' if detail & _KEPT else 'out'} kept gradients"
            return text

        return "; ".join(f"rank {rank}: {call(*row)}" for rank, row in enumerate(self._table))

    def _exhausted(self):
        return [rank for rank, (code, _) in enumerate(self._read()) if code < _ACTIVE]

    def _active(self):
        return [rank for rank, (code, _) in enumerate(self._read()) if code >= _ACTIVE]

    @contextlib.contextmanager
    def _internal(self):
        was, self._is_internal = self._is_internal, True
        try:
            yield
        finally:
            self._is_internal = was

    @contextlib.contextmanager
    def _reporting(self):
        """Keeps an error until all ranks can raise it."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def _check_failures(self):
        """Raises on all ranks if one of them has failed."""
        self._send(*self._table[self._rank])
        self._read()

    # Active ranks.

    def _announce(self, index, config, frame):
        """Tells the exhausted ranks which joinable starts its collectives."""
        if self._is_shadowing:
            return
        joinable = self._joinables[index]
        self._frame = None
        if isinstance(joinable, DistributedDataParallel):
            self._before_forward(index, joinable, config)
            return
        is_zero = isinstance(joinable, ZeroRedundancyOptimizer)
        if is_zero and frame.f_locals.get("closure") is not None:
            self._failure = RuntimeError(
                "step(closure) of a ZeroRedundancyOptimizer is not supported, because a rank "
                "without input cannot evaluate it; call the closure before the step"
            )
        self._exchange(_CALL, index)
        self._check_termination()
        self._frame = frame

    def _after_local_step(self, zero, *_):
        if not self._is_shadowing:
            self._share_gradients(zero)

    def _check_termination(self):
        if self._throw_on_early_termination and self._exhausted():
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            )

    def _before_forward(self, index, ddp, config):
        has_grad, syncs = torch.is_grad_enabled(), ddp.require_backward_grad_sync
        can_rebuild = ddp.static_graph or not ddp.find_unused_parameters
        rebuilds = can_rebuild and ddp in self._synced and not ddp._has_rebuilt_buckets
        config.enable = (has_grad and rebuilds) or (
            ddp.forward_sync_buffers and len(ddp.modules_buffers) > 0
        )
        if has_grad and _lacks_graph(ddp):
            self._failure = RuntimeError(
                "this rank had no input in the first pass of a static graph, so its reducer lacks "
                "the graph; construct DistributedDataParallel again"
            )
        is_awaited = has_grad and self._throw_on_early_termination
        if config.enable or is_awaited or self._failure is not None:
            self._exchange(_FORWARD, index, _HAS_GRAD * has_grad + _SYNCS * syncs)
            self._check_termination()
        if has_grad:
            self._current[:] = None, -1
            self._begun.discard(ddp)
            if torch._C._current_graph_task_id() < 0:  # The last pass may have failed.
                self._end_pass()
            if syncs:
                self._expecting.add(ddp)

    def _before_gradient(self, index, ddp):
        """Runs before a backward pass adds the first gradient to a parameter of the module."""
        if ddp in self._carried and not _digest(self._reduced[ddp]):
            self._cleared.add(ddp)
        self._carried.discard(ddp)
        if ddp in self._expecting:
            self._begin_pass()
            self._begin_backward(index, ddp)
        elif ddp in self._begun and (_is_incomplete(ddp.reducer) or _is_nested()):
            self._begin_pass()  # It is inside of the other, or completes its reduction.
        else:  # A pass under no_sync.
            if ddp in self._synced - self._unsynced and _digest(self._reduced[ddp]):
                self._mixed.add(ddp)
            self._unsynced.add(ddp)

    def _begin_pass(self):
        if not (self._is_reducing or _is_nested()):  # Else the callback would run too early.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        self._is_reducing = True

    def _end_pass(self):
        self._is_reducing = False

    def _check_last_is_complete(self, index):
        """Raises if the collectives of two reductions alternate, as only active ranks know.

        The exhausted ranks wait in the last one, so that it is completed here.
        """
        last = self._last
        if last not in self._begun or _has_hook(last) or not self._exhausted():
            return
        buckets = last.reducer._get_zeros_like_grad_buckets()
        if self._launched >= len(buckets):
            return
        with self._internal():
            self._reduce(last, buckets, done=self._launched)
        self._failure = RuntimeError(
            f"the reduction of joinable {self._joinables.index(last)} began before that of "
            f"joinable {index} and is not complete, and {_ranks(self._exhausted())} had no more "
            "input; call backward() for each"
        )
        self._check_failures()

    def _begin_backward(self, index, ddp):
        self._check_last_is_complete(index)
        self._expecting.remove(ddp)
        self._begun.add(ddp)
        self._last, self._launched = ddp, 0
        is_mixed, is_cleared = ddp in self._mixed, ddp in self._cleared
        is_synced = ddp in self._synced and ddp not in self._unsynced
        has_grad = any(param.grad is not None for param in self._reduced[ddp])
        kept = is_mixed or (is_synced and has_grad)
        self._synced.add(ddp)
        for marks in (self._unsynced, self._mixed, self._cleared):
            marks.discard(ddp)
        if self._throw_on_early_termination:
            return
        detail = _KEPT * kept + _MIXED * is_mixed + _CLEARED * is_cleared
        self._exchange(_BACKWARD, index, detail)
        if kept and self._exhausted():
            self._share_kept(ddp, is_mixed)
        self._count(ddp, 1)

    def _count(self, ddp, present):
        """Gives the reducer the number of active ranks as its divisor, if that is wanted."""
        if ddp._divide_by_initial_world_size:
            return
        count = torch.full((1,), float(present), device=self._device)
        with self._internal():
            work = dist.all_reduce(count, group=self._process_group, async_op=True)
        ddp.reducer._set_forward_pass_work_handle(work, False)
        self._count_work[ddp] = work

    def _before_collective(self, group, args):
        """Announces a collective that neither this class nor a joinable calls."""
        in_backward = torch._C._current_graph_task_id() >= 0  # Also on the engine's own threads.
        if self._is_internal or not (in_backward or threading.get_ident() == self._thread):
            return
        first = frame = sys._getframe().f_back
        if self._is_reducing and (frame is None or frame.f_code is _ENGINE):  # A reducer calls it.
            self._launched += 1
            return
        if args.name.name in _join_calls.MESSAGES:  # Not all active ranks make it.
            known = self._table or []
            if args.root in [rank for rank, (code, _) in enumerate(known) if code < _ACTIVE]:
                call, place = _join_calls.call_of(group, args, first), _join_calls.place_of(first)
                self._failure = self._refused(call, place, f"rank {args.root} does not answer")
                self._check_failures()
            return
        while frame is not None and frame.f_code is not _ENGINE:
            if frame is self._frame:
                return
            if frame.f_code in _ANNOUNCED and frame.f_locals["self"] in self._joinables:
                return
            frame = frame.f_back
        is_amid = in_backward and self._is_reducing
        if is_amid and (self._last._comm_hooks or not self._exhausted()):
            return
        call = _join_calls.call_of(group, args, first)
        if is_amid:
            reason = "it is in the middle of the reductions of a backward pass"
        else:
            self._exchange(_COLLECTIVE, detail=call.digest())
            self._check_termination()
            if not self._exhausted():
                return

            def make():
                call.is_of_weights = _join_calls.is_of_weights(args, first, self._params)
                return call, _join_calls.place_of(first)

            call, _ = self._broadcast(make)  # All ranks decide by what one of them sees.
            reason = call.refusal(self._exhausted())
        if reason:
            raise self._refused(call, _join_calls.place_of(first), reason)
        if call.op == "AVG":
            with torch.no_grad():
                args.input_tensors[0].mul_(len(self._table) / len(self._active()))

    def _refused(self, call, place, reason):
        return RuntimeError(
            f"Join: {call.text()} at {place} while {_ranks(self._exhausted())} had no more input: "
            f"{reason}. Inside of a Join context a rank without input shadows the listed modules "
            "and optimizers, and all_reduce, reduce, broadcast and barrier of the program; list "
            "what is missing, move the call behind the context, or set throw_on_early_termination"
        )

    # Exhausted ranks.

    def _shadow(self):
        """Shadows the active ranks until there is none, then makes the ranks' states equal."""
        shadowed = 0
        while True:
            self._send(_EXHAUSTED if shadowed else _JUST_EXHAUSTED)
            active = [row for row in self._read() if row[0] >= _ACTIVE]
            if not active:
                break
            if self._throw_on_early_termination:
                raise RuntimeError(f"Rank {self._rank} exhausted all inputs.")
            index, kind = divmod(active[0][0] - _ACTIVE, 8)
            joinable, detail = self._joinables[index], active[0][1]
            if kind == _FORWARD:
                self._shadow_forward(joinable, bool(detail & _HAS_GRAD), bool(detail & _SYNCS))
            elif kind == _BACKWARD:
                is_cleared = any(detail & _CLEARED for _, detail in active)
                self._shadow_backward(joinable, detail, is_cleared)
            elif kind == _COLLECTIVE:
                self._shadow_collective()
            elif isinstance(joinable, ZeroRedundancyOptimizer):
                self._shadow_zero(joinable)
            else:
                self._join_hooks[index].main_hook()
            shadowed += 1
            if shadowed == _SKEW_WARNING:
                warnings.warn(
                    f"Join: rank {self._rank} has no more input since {shadowed} calls of the "
                    "other ranks; distribute the inputs more evenly",
                    stacklevel=3,
                )
        last = [rank for rank, (code, _) in enumerate(self._table) if code == _JUST_EXHAUSTED]
        for hook in self._join_hooks:
            hook.post_hook(self._rank in last)
        if len(last) < len(self._table):
            self._copy_states(last)

    def _shadow_collective(self):
        call, place = self._broadcast(None)
        reason = call.refusal(self._exhausted())
        if reason:
            raise self._refused(call, place, reason)
        group = next(g for g in self._groups if g.group_name == call.group)
        _join_calls.shadow(call, group, self._device)

    def _shadow_forward(self, ddp, has_grad, syncs):
        """Makes the collectives of one forward pass."""
        if has_grad and ddp.reducer._rebuild_buckets():
            ddp._has_rebuilt_buckets = True
        ddp._check_and_sync_module_buffers()
        ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = has_grad and syncs

    def _shadow_backward(self, ddp, detail, is_cleared):
        """Makes the collectives of one backward pass, in the reducer's order."""
        kept = self._share_kept(ddp, bool(detail & _MIXED)) if detail & _KEPT else {}
        self._synced.add(ddp)
        self._count(ddp, 0)
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        if ddp in self._carried and is_cleared:
            self._unsynced.discard(ddp)
        own = self._add_gradients(ddp, buckets, kept)
        is_first_static = ddp.static_graph and not _has_static_pass(ddp)
        self._reduce(ddp, buckets, own, is_first_static)
        if is_first_static:
            ddp._evenkeel_shadowed_static_pass = True
        else:
            ddp.reducer._push_all_rebuilt_params()

    def _reduce(self, ddp, buckets, own=(), is_first_static=False, done=0):
        """Makes the collectives of a reduction except the first `done` buckets."""
        # The first static pass reduces the map of used parameters first and records no order.
        if is_first_static:
            self._reduce_used_map(ddp, own)
        works = [ddp.reducer._run_comm_hook(bucket) for bucket in buckets[done:]]
        if ddp.find_unused_parameters and not ddp.static_graph:
            self._reduce_used_map(ddp, own)
        for work in works:
            work.wait()

    def _add_gradients(self, ddp, buckets, kept):
        """Puts into the zero buckets what this rank has of its own, and what all have kept.

        Returns the parameters with a gradient from `no_sync`.
        """
        is_unsynced = ddp in self._unsynced
        self._unsynced.discard(ddp)
        if not (is_unsynced or kept):
            return set()
        initial = ddp._divide_by_initial_world_size
        # A communication hook divides by itself.
        divisor = 1 if _has_hook(ddp) else len(self._table) if initial else len(self._active())
        own = set()
        for bucket in buckets:
            for param, grad in zip(bucket.parameters(), bucket.gradients()):
                if torch.ops.aten.is_non_overlapping_and_dense(param):  # The reducer's layout.
                    grad = grad.as_strided(param.size(), param.stride(), grad.storage_offset())
                if is_unsynced and param.grad is not None:
                    grad.add_(param.grad / divisor)
                    param.grad = None
                    own.add(param)
                if param in kept:
                    grad.add_(kept[param].to(grad.device) / divisor)
        if is_unsynced and ddp.find_unused_parameters and not ddp.static_graph:
            ddp.reducer._reset_state()  # Its local map still marks the parameters as used.
        return own

    def _reduce_used_map(self, ddp, own):
        used = ddp.reducer._get_local_used_map()
        used.copy_(torch.tensor([param in own for param in self._reduced[ddp]]))
        dist.all_reduce(used, group=self._process_group)

    # The record that an active rank sends to exhausted ranks.

    def _share_kept(self, ddp, is_mixed):
        """Returns the gradients that the active ranks have kept from a reduction, by parameter."""
        if is_mixed:
            raise RuntimeError(
                f"Join: joinable {self._joinables.index(ddp)} adds a pass under no_sync to the "
                f"gradients of a synchronized one, and {_ranks(self._exhausted())} had no more "
                "input; call zero_grad() between them, or backward() without no_sync"
            )
        if not ddp._divide_by_initial_world_size:
            return {}  # The active ranks alone make the mean of what all of them have kept.
        params = self._reduced[ddp]
        grads = self._broadcast(lambda: [p.grad for p in params] if _digest(params) else []) or []
        return {param: grad for param, grad in zip(params, grads) if grad is not None}

    def _share_gradients(self, zero):
        """Broadcasts what a step of the exhausted ranks' shards needs.

        Returns there [(parameter, gradient or None)] of these shards, whose weights are set.
        """
        exhausted = self._exhausted()
        if not exhausted:
            return []

        def in_shards():
            return [p for p in _params_of(zero) if zero._param_to_rank[p] in exhausted]

        received = self._broadcast(
            lambda: (
                _join_states.groups_of(zero, self._positions),
                [p.requires_grad for p in _params_of(zero)],
                [(p.detach(), p.grad) for p in in_shards()],
            )
        )
        if self._is_shadowing:
            with self._reporting():
                groups, trained, sent = received
                _join_states.set_groups(zero, groups, self._params)
        self._check_failures()
        if not self._is_shadowing:
            return []
        for param, requires_grad in zip(_params_of(zero), trained):  # ZeRO's buckets depend on it.
            param.requires_grad_(requires_grad)
        for param, (value, _) in zip(in_shards(), sent):
            param.detach().copy_(value)  # The program may have changed it outside of its steps.
        return [(param, grad) for param, (_, grad) in zip(in_shards(), sent)]

    def _shadow_zero(self, zero):
        """Steps this rank's shard as an active rank would; the rank's own gradients stay.

        Hooks that the program runs before a step have changed the gradients already. Those after
        it run, and may call collectives as those of the active ranks do.
        """
        trained = [(p, p.requires_grad) for p in _params_of(zero)]
        shared = self._share_gradients(zero)
        own = [(p, p.grad) for p, _ in shared]
        _set_gradients(shared)
        zero._local_step()
        zero._sync_params()
        _set_gradients(own)
        for param, requires_grad in trained:
            param.requires_grad_(requires_grad)
        self._is_shadowing = self._is_internal = False
        for hook in zero._optimizer_step_post_hooks.values():
            hook(zero, (), {})
        self._is_shadowing = self._is_internal = True

    def _copy_states(self, last):
        """Copies to the ranks outside of `last` what their own loop has not updated."""

        optimizers = [
            o for o in (*self._stateful, *self._zeros) if isinstance(o, torch.optim.Optimizer)
        ]

        def others():
            groups = [g for o in optimizers for g in _join_states.param_groups(o)]
            return [p for g in groups for p in g["params"] if p not in self._positions]

        def make():
            reduced = [ddp for ddp in self._ddps if ddp in self._synced - self._unsynced]
            return (
                [_join_states.groups_of(o, self._positions) for o in optimizers],
                [_join_states.state_of(other) for other in self._stateful],
                self._unlisted.states(),
                [p.detach() for p in others()],
                [(self._ddps.index(d), [p.grad for p in self._reduced[d]]) for d in reduced],
            )

        received = self._broadcast(make, last[-1])
        if self._rank not in last:
            with self._reporting():
                groups, states, unlisted, weights, grads = received
                for other, values in zip(optimizers, groups):
                    _join_states.set_groups(other, values, self._params)
                for other, state in zip(self._stateful, states):
                    _join_states.load(other, state)
                self._unlisted.take_over(unlisted)
                for param, value in zip(others(), weights):
                    param.detach().copy_(value)
                for index, values in grads:
                    if self._ddps[index] not in self._unsynced:
                        _set_gradients(zip(self._reduced[self._ddps[index]], values))
        self._check_failures()

    def _broadcast(self, make, source=None):
        """Returns `make()` of the source, the highest active rank if there is none given.

        If it fails there, all ranks raise. Where it cannot be unpacked it is None, and all ranks
        raise with the next table.
        """
        source = max(self._active()) if source is None else source
        box, value, failure = [None], None, None
        if self._rank == source:
            try:
                value = make()
                packed, flat = _join_states.pack(value, self._device)
                box = [(pickle.dumps(packed), flat.numel(), "")]
            except Exception as error:
                failure, box = error, [(b"", 0, _text_of(self._rank, error))]
        with self._internal():
            group = self._process_group
            dist.broadcast_object_list(box, group=group, group_src=source, device=self._device)
            packed, size, text = box[0]
            if text:
                raise RuntimeError(f"Join: {text}") from failure
            if self._rank != source:
                flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            if size:
                dist.broadcast(flat, group=group, group_src=source)
        if self._rank != source:
            with self._reporting():
                value = _join_states.unpack(pickle.loads(packed), flat, self._device)
        return value

    # Failures.

    def _record(self, error):
        """Records the first failure of the context, or notes it on the failures that follow."""
        if getattr(error, "kind", "") == "disagreement" and hasattr(error, "add_note"):
            error.add_note(
                "Join: a rank without input takes part in what listed modules and optimizers do, "
                "and in collectives of groups of the same ranks, not in messages and other groups"
            )
        name = self._process_group.group_name
        text = _text_of(self._rank, error)
        try:
            store = dist.distributed_c10d._get_default_store()
            key = f"evenkeel_c10d/join/{name}/{_contexts[name]}"
            first = store.compare_set(key, "", text).decode()
        except Exception:  # The store has left with its rank: there is nothing to report.
            return
        if first != text and hasattr(error, "add_note"):
            error.add_note(f"Join: the first failure was on {first}")


def _compared(code, detail):
    """Returns the part of an active rank's row that must be the same on all active ranks."""
    kind = (code - _ACTIVE) % 8
    return code, 0 if kind == _ENTRY else detail & ~_CLEARED if kind == _BACKWARD else detail


def _text_of(rank, error):
    return f"rank {rank}: {type(error).__name__}: {error}"


def _ranks(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_nested():
    """Returns whether a backward pass runs inside of another (a reentrant checkpoint)."""
    engines, frame = 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:  # On a GPU's thread it is the only sign.
            return True
        engines += frame.f_code is _ENGINE
        frame = frame.f_back
    return engines > 1


def _is_incomplete(reducer):
    """Returns whether the reducer waits for more gradients."""
    try:
        reducer._check_reducer_finalized()
        return False
    except RuntimeError:
        return True


def _params_of_reducer(ddp):
    """Returns what the module reduces, also if it has been frozen since, in the reducer's order."""
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    in_reducer = {param for bucket in buckets for param in bucket.parameters()}
    return [param for param in ddp.module.parameters() if param in in_reducer]


def _params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_hook(ddp):
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))


def _digest(params):
    """Returns a number that depends on the gradients, and is 0 if all are 0 or None.

    A gradient without elements is as none.
    """
    grads = [p.grad for p in params if p.grad is not None and p.grad.numel()]
    norms = [
        torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        for grad in (grad.coalesce().values() if grad.is_sparse else grad for grad in grads)
    ]
    values = torch.stack([norm.double() for norm in norms]).tolist() if norms else []
    return 1 + zlib.crc32(repr(values).encode()) if any(values) else 0


def _check_supported(ddp):
    location = getattr(getattr(ddp, "buffer_hook", None), "buffer_comm_hook_location", None)
    for feature, is_used in {
        "delay_all_reduce_named_params": ddp._delay_all_reduce_params,
        "skip_all_reduce_unused_params": getattr(ddp, "skip_all_reduce_unused_params", False),
        "the Python reducer": ddp._use_python_reducer,
        "a buffer hook after the forward pass": location is _BufferCommHookLocation.POST_FORWARD,
        "an embedding with sparse gradients": any(
            getattr(module, "sparse", False) is True for module in ddp.module.modules()
        ),
    }.items():
        if is_used:
            raise ValueError(f"Join: DistributedDataParallel with {feature} is not supported")


def _has_static_pass(ddp):
    return ddp._static_graph_delay_allreduce_enqueued or hasattr(
        ddp, "_evenkeel_shadowed_static_pass"
    )


def _lacks_graph(ddp):
    is_started = not ddp.static_graph or ddp._static_graph_delay_allreduce_enqueued
    return not is_started and hasattr(ddp, "_evenkeel_shadowed_static_pass")


def _set_gradients(pairs):
    for param, grad in pairs:
        param.grad = None if grad is None else grad.to(param.device)
