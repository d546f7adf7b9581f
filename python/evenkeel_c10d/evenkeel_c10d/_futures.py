"""Futures of collectives, whose callbacks run when they are attached.

A callback may call collectives, as those of PowerSGD do, and all ranks must call collectives in one
order. A callback that runs when its collective has ended has no place in this order: then() runs it
at once on a rank where the collective has ended, and on another it runs beside the program later.
With NCCL every callback runs inside then(), because NCCL's futures are complete from the start.
The futures of this module have the same order: then() waits for the collective.
"""

import torch.distributed as dist
import torch.futures

from . import _bridge

# These callbacks call no collective, so they may run beside the backward pass.
_WITHOUT_COLLECTIVES = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


class Future(torch.futures.Future):
    """The future that get_future() of a collective returns."""

    def __init__(self, future):
        super().__init__()
        _bridge.share_future(future, self)

    def then(self, callback):
        self._await_for(callback)
        return Future(super().then(callback))

    def add_done_callback(self, callback):
        self._await_for(callback)
        super().add_done_callback(callback)

    def _await_for(self, callback):
        if getattr(callback, "__module__", None) != _WITHOUT_COLLECTIVES:
            _bridge.await_future(self)


def _get_future(work):
    future = dist.Work.get_future(work)
    # A message may answer one that this thread sends later: then() must not wait for it.
    return future if work.is_message() else Future(future)


_bridge.Work.get_future = _get_future
