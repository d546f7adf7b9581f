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

- ZeroRedundancyOptimizer: before a step that an exhausted rank shadows, an active rank sends it
  the gradients of its shard and the settings (learning rate ...), as they are at the call of
  `step`, after clipping and unscaling. torch steps the shard with a stale gradient or with none.
- Steps are announced while a rank is exhausted, so they may be skipped or come after several
  `no_sync` passes. ZeroRedundancyOptimizer may be alone or first in the list.
- Other optimizers, schedulers, scalers and modules (anything with `state_dict` and
  `load_state_dict`) may be in the list: exhausted ranks get the state of a rank that trained to
  the end.
- A gradient that an exhausted rank accumulated under `no_sync` is added to the next reduction;
  torch drops it. The other gradients of an exhausted rank stay as its loop left them.
- `find_unused_parameters`, `static_graph` and forward passes without gradients are shadowed
  exactly: a parameter that no active rank uses keeps its gradient (or None).
- The context ends with the `with` block; torch's leaves its collectives enabled.
- One int64 message per forward pass, a table with one entry per rank, carries the number of active
  ranks, their calls and early termination. Different calls are reported with the ranks' numbers.

Order:   All ranks list the same objects in the same order. Active ranks make the same sequence of
         forward passes and steps; the backward pass of one forward pass ends before the next
         announced call. No other collective is allowed in the loop (SyncBatchNorm, barriers,
         reductions of a metric): use throw_on_early_termination.
Errors:  With throw_on_early_termination all ranks raise RuntimeError in the same forward pass. An
         exception in the loop of one rank passes through at once and is recorded in the c10d
         store. It cannot complete the collectives in which the other ranks wait: these fail when
         the connection closes, at the latest after the group's timeout, and their exception then
         has a note that names the first failure. The group must not be used afterwards.
Trust:   Settings and states travel pickled inside the group, as in `broadcast_object_list`.
Limits:  Gradients that are accumulated over several synchronized backward passes without `no_sync`
         weigh less once a rank is exhausted (as in torch). `step(closure)` of a
         ZeroRedundancyOptimizer, `delay_all_reduce_named_params`, `skip_all_reduce_unused_params`
         and the Python reducer are not supported. A buffer hook and a stateful communication hook
         (PowerSGD) see zeros on exhausted ranks. With static_graph a rank without any input in the
         first context cannot use the module afterwards.
"""

import collections
import functools
import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join as torch_join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Join"]

# Rank states in the table that all ranks exchange before each forward pass and, while a rank is
# exhausted, before each step. An active rank sends _ACTIVE + 4 * joinable + 2 * has_grad + syncs.
_JUST_EXHAUSTED, _EXHAUSTED, _ACTIVE = 1, 2, 3
_SKEW_WARNING = 1000
_contexts = collections.Counter()  # Contexts entered, by group name: the same on all ranks.


class _Config:
    """Replaces torch's `_JoinConfig` in a Joinable while the context is open.

    Each Joinable calls torch's `Join.notify_join_context` before its collectives, which reads
    `is_first_joinable` once. The announcement is made there, so that torch adds no message.
    """

    enable = True
    throw_on_early_termination = False

    def __init__(self, announce):
        self._announce = announce

    @property
    def is_first_joinable(self):
        self._announce()
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
        for ddp in own:
            if isinstance(ddp, DistributedDataParallel):
                _check_supported(ddp)
        super().__init__(own, enable, throw_on_early_termination, **kwargs)
        self._has_ddp = any(isinstance(j, DistributedDataParallel) for j in own)
        self._clear()

    def _clear(self):
        self._is_shadowing = False
        self._codes = None  # The table: one code per rank of the group.
        self._pending_table = None  # The table in flight, and its work.
        self._unsynced = set()  # Modules whose last backward pass was not synchronized.
        self._count_work = {}  # The work that the reducer of a module takes its divisor from.

    def _set_joinable_configs(self):
        """Does nothing here; `__enter__` and `__exit__` set the configurations."""

    def __enter__(self):
        if not self._enable:
            return
        self._clear()
        _contexts[self._process_group.group_name] += 1
        for index, joinable in enumerate(self._joinables):
            if not getattr(joinable, "_overlap_with_ddp", False):  # It steps in DDP's hook.
                joinable._join_config = _Config(functools.partial(self._announce, index))

    def __exit__(self, exception_type, exception, traceback):
        if not self._enable:
            return
        try:
            if exception is None:
                self._is_shadowing = True
                self._shadow()
            else:
                self._record(exception)
        except BaseException as error:
            self._record(error)
            raise
        finally:
            for joinable in self._joinables:
                joinable._join_config = torch_join._JoinConfig.construct_disabled_join_config()
            for ddp, work in self._count_work.items():  # Divide by the world size again.
                ddp.reducer._set_forward_pass_work_handle(work, True)

    # The exchange of the table.

    def _exchange(self, code):
        """Starts the exchange of the table; `_read` waits for it."""
        if self._pending_table is not None:
            self._pending_table[1].wait()
        table = torch.zeros(
            dist.get_world_size(self._process_group), dtype=torch.int64, device=self._device
        )
        table[self._rank] = code
        work = dist.all_reduce(table, group=self._process_group, async_op=True)
        self._pending_table = table, work

    def _read(self):
        """Returns the codes of the last exchange."""
        if self._pending_table is not None:
            table, work = self._pending_table
            work.wait()
            self._codes, self._pending_table = table.tolist(), None
            calls = {code for code in self._codes if code >= _ACTIVE}
            if len(calls) > 1:
                raise RuntimeError(f"Join: the ranks make different calls: {self._describe()}")
        return self._codes

    def _describe(self):
        def call(code):
            if code < _ACTIVE:
                return "no more input"
            index, flags = divmod(code - _ACTIVE, 4)
            name = type(self._joinables[index]).__name__
            return f"{name} (joinable {index}) with{'' if flags & 2 else 'out'} gradients, " + (
                "synchronized" if flags & 1 else "no_sync"
            )

        return "; ".join(f"rank {rank}: {call(code)}" for rank, code in enumerate(self._codes))

    def _exhausted(self):
        return [rank for rank, code in enumerate(self._read()) if code < _ACTIVE]

    # Active ranks.

    def _announce(self, index):
        """Tells the exhausted ranks which joinable starts its collectives."""
        if self._is_shadowing:
            return
        joinable = self._joinables[index]
        is_zero = isinstance(joinable, ZeroRedundancyOptimizer)
        is_told = is_zero and self._has_ddp and self._started() and not self._exhausted()
        if is_told:  # All ranks made the last forward pass, so all make this step.
            return
        has_grad = torch.is_grad_enabled()
        syncs = getattr(joinable, "require_backward_grad_sync", True)
        self._exchange(_ACTIVE + 4 * index + 2 * has_grad + syncs)
        if self._throw_on_early_termination and self._exhausted():
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            )
        if is_zero:
            self._share_gradients(joinable)
        elif isinstance(joinable, DistributedDataParallel):
            if has_grad:
                (self._unsynced.discard if syncs else self._unsynced.add)(joinable)
            _check_started(joinable)
            self._count(joinable, 1)

    def _started(self):
        return self._codes is not None or self._pending_table is not None

    def _count(self, ddp, present):
        """Gives the reducer the number of active ranks as its divisor, if that is wanted."""
        if ddp._divide_by_initial_world_size:
            return
        count = torch.full((1,), float(present), device=self._device)
        work = dist.all_reduce(count, group=self._process_group, async_op=True)
        ddp.reducer._set_forward_pass_work_handle(work, False)
        self._count_work[ddp] = work

    # Exhausted ranks.

    def _shadow(self):
        """Shadows the active ranks until there is none, then makes the ranks' states equal."""
        shadowed = 0
        while True:
            self._exchange(_EXHAUSTED if shadowed else _JUST_EXHAUSTED)
            calls = [code for code in self._read() if code >= _ACTIVE]
            if not calls:
                break
            if self._throw_on_early_termination:
                raise RuntimeError(f"Rank {self._rank} exhausted all inputs.")
            index, flags = divmod(calls[0] - _ACTIVE, 4)
            joinable = self._joinables[index]
            if isinstance(joinable, DistributedDataParallel):
                self._shadow_ddp(joinable, bool(flags & 2), bool(flags & 1))
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
        last = [rank for rank, code in enumerate(self._codes) if code == _JUST_EXHAUSTED]
        for hook in self._join_hooks:
            hook.post_hook(self._rank in last)
        if len(last) < len(self._codes):
            self._copy_states(last)

    def _shadow_ddp(self, ddp, has_grad, syncs):
        """Makes the collectives of one forward and backward pass, in the reducer's order."""
        self._count(ddp, 0)
        if has_grad:
            ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = has_grad and syncs
        if not (has_grad and syncs):
            return
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        own = self._add_own_gradients(ddp, buckets)
        # The first static pass reduces the map of used parameters first and records no order.
        is_first_static = ddp.static_graph and not _has_static_pass(ddp)
        if is_first_static:
            ddp._evenkeel_shadowed_static_pass = True
            self._reduce_used_map(ddp, own)
        works = [ddp.reducer._run_comm_hook(bucket) for bucket in buckets]
        if ddp.find_unused_parameters and not ddp.static_graph:
            self._reduce_used_map(ddp, own)
        for work in works:
            work.wait()
        if not is_first_static:
            ddp.reducer._push_all_rebuilt_params()

    def _add_own_gradients(self, ddp, buckets):
        """Puts gradients from `no_sync` into the zero buckets; returns their parameters."""
        if ddp not in self._unsynced:
            return set()
        self._unsynced.remove(ddp)
        initial = ddp._divide_by_initial_world_size
        divisor = len(self._codes) - (0 if initial else len(self._exhausted()))
        has_hook = bool(ddp._get_ddp_logging_data().get("comm_hook"))
        own = set()
        for bucket in buckets:
            if bucket.buffer().is_sparse:
                continue
            for param, grad in zip(bucket.parameters(), bucket.gradients()):
                if param.grad is None:
                    continue
                if torch.ops.aten.is_non_overlapping_and_dense(param):  # The reducer's layout.
                    grad = grad.as_strided(param.size(), param.stride(), grad.storage_offset())
                # A communication hook divides by itself.
                grad.copy_(param.grad if has_hook else param.grad / divisor)
                param.grad = None
                own.add(param)
        if ddp.find_unused_parameters and not ddp.static_graph:
            ddp.reducer._reset_state()  # Its local map still marks the parameters as used.
        return own

    def _reduce_used_map(self, ddp, own):
        params, _ = ddp._build_params_for_reducer()
        used = ddp.reducer._get_local_used_map()
        used.copy_(torch.tensor([param in own for param in params]))
        dist.all_reduce(used, group=self._process_group)

    # States that an exhausted rank takes over.

    def _share_gradients(self, zero):
        """Broadcasts what a step of the exhausted ranks' shards needs.

        Returns the settings and [(parameter, gradient or None)] of these shards.
        """
        exhausted = self._exhausted()
        if not exhausted:
            return [], []
        source = max(rank for rank in range(len(self._codes)) if rank not in exhausted)
        params = [p for p in zero._all_params if zero._param_to_rank[p] in exhausted]
        has_grad, settings = self._broadcast_object(
            source, lambda: ([p.grad is not None for p in params], _settings(zero))
        )
        grads = dict.fromkeys(params)
        used = [p for p, has in zip(params, has_grad) if has]
        if used:
            if self._rank == source:
                flat = torch.cat([p.grad.reshape(-1) for p in used])
            else:
                flat = used[0].new_empty(sum(p.numel() for p in used), requires_grad=False)
            dist.broadcast(flat, self._global_rank(source), group=self._process_group)
            pieces = flat.split([p.numel() for p in used])
            grads.update((p, piece.view(p.size())) for p, piece in zip(used, pieces))
        return settings, list(grads.items())

    def _shadow_zero(self, zero):
        """Steps this rank's shard as an active rank would; the rank's own gradients stay."""
        settings, shared = self._share_gradients(zero)
        _set_settings(zero, settings)
        own = [(p, p.grad) for p, _ in shared]
        _set_gradients(shared)
        zero.step()
        _set_gradients(own)

    def _copy_states(self, last):
        """Copies to the ranks outside of `last` what their own loop has not updated."""
        zeros = [j for j in self._joinables if isinstance(j, ZeroRedundancyOptimizer)]
        states, settings = self._broadcast_object(
            last[-1], lambda: ([o.state_dict() for o in self._stateful], [*map(_settings, zeros)])
        )
        if self._rank in last:
            return
        for other, state in zip(self._stateful, states):
            other.load_state_dict(state)
        for zero, values in zip(zeros, settings):
            _set_settings(zero, values)

    def _broadcast_object(self, source, make):
        box = [make() if self._rank == source else None]
        dist.broadcast_object_list(
            box, self._global_rank(source), group=self._process_group, device=self._device
        )
        return box[0]

    def _global_rank(self, rank):
        return dist.get_global_rank(self._process_group, rank)

    # Failures.

    def _record(self, error):
        """Records the first failure of the context, or notes it on the failures that follow."""
        name = self._process_group.group_name
        text = f"rank {self._rank}: {type(error).__name__}: {error}"
        try:
            store = dist.distributed_c10d._get_default_store()
            key = f"evenkeel_c10d/join/{name}/{_contexts[name]}"
            first = store.compare_set(key, "", text).decode()
        except Exception:  # The store has left with its rank: there is nothing to report.
            return
        if first != text and hasattr(error, "add_note"):
            error.add_note(f"Join: the first failure was on {first}")


def _check_supported(ddp):
    for feature, is_used in {
        "delay_all_reduce_named_params": ddp._delay_all_reduce_params,
        "skip_all_reduce_unused_params": getattr(ddp, "skip_all_reduce_unused_params", False),
        "the Python reducer": ddp._use_python_reducer,
    }.items():
        if is_used:
            raise ValueError(f"Join: DistributedDataParallel with {feature} is not supported")


def _has_static_pass(ddp):
    return ddp._static_graph_delay_allreduce_enqueued or hasattr(
        ddp, "_evenkeel_shadowed_static_pass"
    )


def _check_started(ddp):
    if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
        if hasattr(ddp, "_evenkeel_shadowed_static_pass"):
            raise RuntimeError(
                "Join: this rank had no input in the first pass of a static graph, so its reducer "
                "lacks the graph; construct DistributedDataParallel again"
            )


def _settings(optimizer):
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _set_settings(optimizer, settings):
    for group, values in zip(optimizer.param_groups, settings):
        group.update(values)


def _set_gradients(pairs):
    for param, grad in pairs:
        param.grad = grad
