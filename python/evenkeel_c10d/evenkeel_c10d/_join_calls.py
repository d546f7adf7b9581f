"""Collectives that a program itself calls inside of a Join context."""

import dataclasses
import os
import zlib

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.utils import average_parameters

_REDUCTIONS = {"ALLREDUCE": "all_reduce", "REDUCE": "reduce"}
_SHADOWED = {**_REDUCTIONS, "BROADCAST": "broadcast", "BARRIER": "barrier"}
MESSAGES = ("SEND", "RECV")
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_NOT_THE_PROGRAM = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


@dataclasses.dataclass
class Call:
    """A collective, as the active ranks call it."""

    name: str
    group: str
    root: int
    op: str  # Of a reduction; "" if it is not known.
    tensors: list  # Shape, type, kind of device and layout of each tensor.
    is_of_weights: bool = False

    def digest(self):
        return zlib.crc32(repr(self).encode())

    def text(self):
        return _SHADOWED.get(self.name, self.name.lower()).replace("allgather", "all_gather")

    def refusal(self, exhausted):
        """Returns why the exhausted ranks cannot take part, or ""."""
        if self.name not in _SHADOWED:
            return "a rank without input has nothing to contribute to it"
        if self.name == "BROADCAST" and self.root in exhausted:
            return f"its source is rank {self.root}"
        if self.name in _REDUCTIONS and not self.op:
            return (
                "its operation is not known here, or it is called by a module or an optimizer that "
                "is not in the list of Join"
            )
        if any(layout != torch.strided for *_, layout in self.tensors):
            return "sparse tensors are not supported"
        if self.is_of_weights and self.op not in ("AVG", "MIN", "MAX"):
            return "the weights of all ranks would be added; use all_reduce with ReduceOp.AVG"
        if self.op == "AVG" and (self.name == "REDUCE" or not self.tensors[0][1].is_floating_point):
            return "the mean of the other ranks is not known here; use all_reduce of floats"
        return ""


def call_of(group, args, frame):
    """Returns the collective whose pre-hook got `args`, called from `frame`."""
    name, op, tensors = args.name.name, "", []
    if name in _REDUCTIONS:
        opts = frame and frame.f_locals.get("opts")  # torch.distributed's.
        wanted = getattr(opts, "reduceOp", None)
        op = next((o for o in _OPS if wanted == getattr(dist.ReduceOp, o)), "")
    if name in _SHADOWED:
        tensors = [(tuple(t.shape), t.dtype, t.device.type, t.layout) for t in args.input_tensors]
    return Call(name, group.group_name, args.root, op, tensors)


def is_of_weights(args, frame, params):
    """Returns whether a parameter is reduced, or torch's average of parameters calls."""
    weights = {param.untyped_storage().data_ptr() for param in params}
    dense = [tensor for tensor in args.input_tensors if tensor.layout == torch.strided]
    if any(tensor.untyped_storage().data_ptr() in weights for tensor in dense):
        return True
    while frame is not None and frame.f_code is not average_parameters.__code__:
        frame = frame.f_back
    return frame is not None


def place_of(frame):
    """Returns the line of the program that has led to `frame`."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown place"


def shadow(call, group, device):
    """Takes part in the collective without changing its result for the other ranks."""
    if call.name == "BARRIER":
        dist.barrier(group=group)
        return
    shape, dtype, kind, _ = call.tensors[0]
    device = device if kind == device.type else torch.device(kind)
    tensor = torch.full(shape, _identity(call.op, dtype), dtype=dtype, device=device)
    if call.name == "BROADCAST":
        dist.broadcast(tensor, group=group, group_src=call.root)
    elif call.name == "REDUCE":
        dist.reduce(tensor, op=getattr(dist.ReduceOp, call.op), group=group, group_dst=call.root)
    else:
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, call.op), group=group)


def _identity(op, dtype):
    if op == "PRODUCT":
        return 1
    if op not in ("MIN", "MAX", "BAND"):
        return 0
    if dtype == torch.bool:
        return op != "MAX"
    if dtype.is_floating_point:
        return float("inf") if op == "MIN" else float("-inf")
    limits = torch.iinfo(dtype)
    if op == "BAND":
        return -1 if limits.min < 0 else limits.max
    return limits.max if op == "MIN" else limits.min
