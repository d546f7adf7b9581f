"""States that a rank without input takes over at the end of a Join context."""

import collections
import gc

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

_KINDS = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, AveragedModel)


def groups_of(optimizer, positions):
    """Returns the settings of each parameter group and the positions of its parameters."""
    return [
        (
            {key: value for key, value in group.items() if key != "params"},
            [positions.get(param) for param in group["params"]],
        )
        for group in optimizer.param_groups
    ]


def set_groups(optimizer, groups, params):
    """Gives the optimizer the settings, and the groups that another rank has added."""
    name = type(optimizer).__name__
    for settings, indices in groups[len(optimizer.param_groups) :]:
        if None in indices:
            raise RuntimeError(
                f"Join: a group of parameters was added to {name} while this rank had no more "
                "input, and some of them belong to no module in the list of Join; add it on all "
                "ranks before the context"
            )
        optimizer.add_param_group({"params": [params[i] for i in indices], **settings})
    own = [len(group["params"]) for group in optimizer.param_groups]
    if own != [len(indices) for _, indices in groups]:
        raise RuntimeError(f"Join: the parameter groups of {name} differ between the ranks")
    for group, (settings, _) in zip(optimizer.param_groups, groups):
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
        return {key: [other.state_dict() for other in others] for key, others in found.items()}

    def take_over(self, states):
        found = self._find(only_stepped=False)
        for key, values in states.items():
            others = found.get(key, [])
            if len(others) > 1 and key[1] == "optimizer":
                others = [other for other in others if id(other) in self._stepped] or others
            if len(others) == len(values) == 1:
                others[0].load_state_dict(values[0])
            elif not others and key[1] != "optimizer":
                continue  # It is on some ranks only.
            elif sorted(_print(o.state_dict()) for o in others) != sorted(map(_print, values)):
                raise RuntimeError(
                    f"Join: a {key[0]} was used inside of the context, and a rank that had no more "
                    f"input has {len(others)} that it may be; add it to the list: "
                    "Join([ddp, optimizer, scheduler])"
                )

    def _find(self, only_stepped):
        found = collections.defaultdict(list)
        for other in gc.get_objects():
            if issubclass(type(other), _KINDS) and not any(other is o for o in self._listed):
                if only_stepped and isinstance(other, torch.optim.Optimizer):
                    if id(other) not in self._stepped:
                        continue
                key = self._key(other)
                if key is not None:
                    found[key].append(other)
        return dict(found)

    def _key(self, other):
        """Returns what identifies the object on all ranks, or None if it is of no listed model."""
        name = type(other).__qualname__
        if isinstance(other, torch.optim.Optimizer):
            params = tuple(self._positions.get(p) for g in other.param_groups for p in g["params"])
            return None if None in params else (name, "optimizer", params)
        if isinstance(other, LRScheduler):
            for index, optimizer in enumerate(self._listed):
                if other.optimizer is optimizer:
                    return name, "scheduler", index
            key = self._key(other.optimizer)
            return None if key is None else (name, "scheduler", key)
        if isinstance(other, AveragedModel):
            shapes = _shapes(other.module)
            return (name, "average", shapes) if shapes in self._shapes else None
        return (name, "scaler") if other.is_enabled() else None


def _print(state):
    """Returns a text that differs where two states do."""
    if torch.is_tensor(state):
        return repr(torch.linalg.vector_norm(state.double()).item())
    if isinstance(state, dict):
        return ", ".join(f"{key}: {_print(value)}" for key, value in state.items())
    return repr(state)


def _shapes(module):
    return tuple(tuple(param.shape) for param in module.parameters())
