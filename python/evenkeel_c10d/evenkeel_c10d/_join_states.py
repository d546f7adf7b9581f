"""States that a rank without input takes over at the end of a Join context."""

import collections
import functools
import gc
import types
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map

_KINDS = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, AveragedModel)
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
    type,
)


class _Tensor:
    """Stands for a tensor in an object that is sent: a dense one travels without its bytes."""

    def __init__(self, tensor):
        self.device = tensor.device.type
        self.value = tensor.to("meta") if _is_dense(tensor) else tensor.cpu()


class _Own(NamedTuple):
    """Stands for an object in a state: each rank keeps its own, with the state of the other."""

    kind: str
    state: Any  # None if the object is followed by itself, or has none.


def _is_dense(tensor):
    return tensor.layout == torch.strided


def pack(value, device):
    """Returns the object without its dense tensors, and their bytes on the device."""
    tensors = [t.detach() for t in tree_leaves(value) if torch.is_tensor(t) and _is_dense(t)]
    packed = tree_map(lambda v: _Tensor(v.detach()) if torch.is_tensor(v) else v, value)
    pieces = [t.to(device).reshape(-1).view(torch.uint8) for t in tensors]
    return packed, torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def unpack(packed, flat, device):
    """Returns what `pack` got, with copies of the tensors on this rank's devices."""
    begin = 0

    def restore(leaf):
        nonlocal begin
        if not isinstance(leaf, _Tensor):
            return leaf
        value = leaf.value
        if value.is_meta:
            end = begin + value.numel() * value.itemsize
            value = flat[begin:end].clone().view(value.dtype).view(value.size())
            begin = end
        return value.to("cpu" if leaf.device == "cpu" else device)

    return tree_map(restore, packed)


def state_of(other):
    """Returns the state without the schedulers, modules and functions that it may hold."""

    def replace(leaf):
        if not _is_object(leaf):
            return leaf
        is_stateless = isinstance(leaf, (torch.optim.Optimizer, *_FUNCTIONS))
        return _Own(type(leaf).__qualname__, None if is_stateless else state_of(leaf))

    return tree_map(replace, other.state_dict())


def load(other, state):
    """Gives the object the state of another rank's."""
    objects = iter([leaf for leaf in tree_leaves(other.state_dict()) if _is_object(leaf)])

    def restore(leaf):
        if not isinstance(leaf, _Own):
            return leaf
        mine = next(objects, None)
        if type(mine).__qualname__ != leaf.kind:
            raise RuntimeError(
                f"Join: the state of a {type(other).__name__} holds a {leaf.kind} on another rank, "
                f"and a {type(mine).__qualname__} on this one; change it on all ranks before the "
                "context"
            )
        if leaf.state is not None:
            load(mine, leaf.state)
        return mine

    other.load_state_dict(tree_map(restore, state, is_leaf=lambda v: isinstance(v, _Own)))


def _is_object(leaf):
    if isinstance(leaf, (torch.optim.Optimizer, LRScheduler, *_FUNCTIONS)):
        return True
    return callable(leaf) and hasattr(leaf, "state_dict") and hasattr(leaf, "load_state_dict")


def groups_of(optimizer, positions):
    """Returns the settings of each parameter group and the positions of its parameters."""
    return [
        (
            {key: value for key, value in group.items() if key != "params"},
            [positions.get(param) for param in group["params"]],
        )
        for group in param_groups(optimizer)
    ]


def param_groups(optimizer):
    return getattr(optimizer, "param_groups", [])  # Some wrappers have none.


def set_groups(optimizer, groups, params):
    """Gives the optimizer the settings, and the groups that another rank has added."""
    name = type(optimizer).__name__
    for settings, indices in groups[len(param_groups(optimizer)) :]:
        if None in indices:
            raise RuntimeError(
                f"a group of parameters was added to {name} while this rank had no more input, and "
                "some of them belong to no module in the list of Join; add it on all ranks before "
                "the context"
            )
        optimizer.add_param_group({"params": [params[i] for i in indices], **settings})
    own = [len(group["params"]) for group in param_groups(optimizer)]
    if own != [len(indices) for _, indices in groups]:
        raise RuntimeError(f"the parameter groups of {name} differ between the ranks")
    for group, (settings, _) in zip(param_groups(optimizer), groups):
        group.update(settings)


class Unlisted:
    """Finds optimizers, schedulers, scalers and averaged models of the models in the list of Join.

    They are found by their types among all objects of the process, which takes some 50 ms, and
    only at the end of a context in which a rank ran out of input before others.
    """

    def __init__(self, listed, modules, positions):
        self._listed = listed
        self._shapes = {_shapes(module) for module in modules}
        self._positions = positions
        self._stepped = {}
        for zero in listed:  # The part of a ZeroRedundancyOptimizer that has its rank's shard.
            if isinstance(getattr(zero, "optim", None), torch.optim.Optimizer):
                self._listed = [*self._listed, zero.optim]

    def note_step(self, optimizer, *_):
        if not any(optimizer is other for other in self._listed):
            self._stepped[id(optimizer)] = optimizer

    def states(self):
        """Returns the states of the unlisted objects that this rank has used, by their keys."""
        found = self._find(only_stepped=True)
        for name, kind, params in (key for key in found if key[1] == "optimizer"):
            if None in params:
                raise RuntimeError(
                    f"{name} has parameters of the listed modules and others; add it to the list "
                    "of Join"
                )
        return {key: [state_of(other) for other in others] for key, others in found.items()}

    def take_over(self, states):
        found = self._find(only_stepped=False)
        for key, values in states.items():
            others = found.get(key, [])
            if len(others) > 1 and key[1] == "optimizer":
                others = [other for other in others if id(other) in self._stepped] or others
            if len(others) == len(values) == 1:
                load(others[0], values[0])
            elif not others and key[1] != "optimizer":
                continue  # It is on some ranks only.
            elif sorted(_print(state_of(o)) for o in others) != sorted(map(_print, values)):
                raise RuntimeError(
                    f"a {key[0]} was used inside of the context while this rank had no more input, "
                    f"and {len(others)} of its objects may be that one; add it to the list: "
                    "Join([ddp, optimizer, scheduler])"
                )

    def _find(self, only_stepped):
        objects = [o for o in gc.get_objects() if issubclass(type(o), _KINDS)]
        skipped = {id(other) for other in self._listed}
        for other in objects:  # A scheduler's state has those of its parts.
            if isinstance(other, LRScheduler):
                parts = [*getattr(other, "_schedulers", ()), *tree_leaves(other.state_dict())]
                skipped.update(id(part) for part in parts if isinstance(part, LRScheduler))
        found = collections.defaultdict(list)
        for other in objects:
            is_unused = isinstance(other, torch.optim.Optimizer) and id(other) not in self._stepped
            if id(other) in skipped or (only_stepped and is_unused):
                continue
            key = self._key(other)
            if key is not None:
                found[key].append(other)
        return dict(found)

    def _key(self, other):
        """Returns what identifies the object on all ranks, or None if it is of no listed model."""
        name = type(other).__qualname__
        if isinstance(other, torch.optim.Optimizer):
            params = [self._positions.get(p) for g in param_groups(other) for p in g["params"]]
            return (name, "optimizer", tuple(params)) if {*params} - {None} else None
        if isinstance(other, LRScheduler):
            for index, optimizer in enumerate(self._listed):
                if other.optimizer is optimizer:
                    return name, "scheduler", index
            key = self._key(other.optimizer)
            return None if key is None else (name, "scheduler", key)
        if isinstance(other, AveragedModel):
            shapes = _shapes(other.module)
            rule = _text_of(other.avg_fn), _text_of(other.multi_avg_fn)
            return (name, "average", shapes, rule) if shapes in self._shapes else None
        if not other.is_enabled():
            return None
        return name, "scaler", other.get_growth_factor(), other.get_growth_interval()


def _text_of(function):
    """Returns a text that is the same on all ranks."""
    cells = getattr(function, "__closure__", None) or ()
    values = [c.cell_contents for c in cells if isinstance(c.cell_contents, (int, float))]
    return f"{getattr(function, '__qualname__', type(function))} {values}"


def _print(state):
    """Returns a text that differs where two states do."""
    if torch.is_tensor(state):
        return repr(torch.linalg.vector_norm(state.double()).item())
    if isinstance(state, dict):
        return ", ".join(f"{key}: {_print(value)}" for key, value in state.items())
    return repr(state)


def _shapes(module):
    return tuple(tuple(param.shape) for param in module.parameters())
