"""evenkeel as a backend of torch.distributed.

    torch.distributed.init_process_group("evenkeel")

Torch finds the backend by its entry point; before torch 2.14 import this package first. What a
failed operation raises is `evenkeel_c10d.Error`.
"""

import atexit
import datetime
import multiprocessing.util
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist

import evenkeel_c10d_autoload

from . import _bridge, _futures  # noqa: F401  _futures replaces get_future() of works.

__version__ = _bridge.version
__all__ = [
    "BalancedSampler",
    "Error",
    "Join",
    "ProcessGroup",
    "flight_json",
    "make_default",
    "register",
    "replace_gloo",
    "transport",
    "watch",
]

# How long the end of a process waits for the operations that it has issued.
_EXIT_TIMEOUT = datetime.timedelta(seconds=10)

# A process that ends because of a failed group stays this long, so that the rank that caused the
# failure ends first: torch.multiprocessing.spawn() reports the process that ends first.
_MOMENT_S = 1.0

_LONGEST_REASON = 2000  # Characters of an exception that the peers get.


class Error(dist.DistBackendError):
    """The error of a group that has ended; message, kind and ranks are the same on all ranks.

    Attributes:
        kind: "lost" (`ranks` were killed, crashed or fell silent), "failed" (they reported an error or
            aborted), "disagreement" (the ranks called different operations, or `ranks` had left while
            others went on) or "deadline" (`ranks` did not arrive in time). Empty if nothing is known.
        ranks: the ranks of the group that caused it, ascending; empty if they are not known.
        operation: the operation of `ranks` if the ranks disagreed, else the one in which this rank
            was; empty outside of one.
        position: the number of the operation; -1 if there is none.
    """

    def __init__(self, message, *, kind="", ranks=(), operation="", position=-1):
        super().__init__(message)
        self.kind = kind
        self.ranks = tuple(ranks)
        self.operation = operation
        self.position = position

    def __reduce__(self):
        return _restore, (type(self), str(self), self.__dict__)


def _restore(cls, message, attributes):
    error = cls(message)
    error.__dict__.update(attributes)
    return error


Error.__module__ = __name__
_bridge.set_error_type(Error)


def _create(options, backend_options):
    if dist.is_gloo_available() and isinstance(backend_options, dist.ProcessGroupGloo._Options):
        raise NotImplementedError(
            "evenkeel: the group is to be made with Gloo's pg_options, which evenkeel cannot follow: "
            "leave pg_options out, and set timeout= instead of their timeout."
        )
    if getattr(options, "enable_reconfigure", False):
        raise NotImplementedError(
            "evenkeel: enable_reconfigure=True is not supported: after a failure call "
            "destroy_process_group() and init_process_group()."
        )
    return _bridge.create(
        store=options.store,
        rank=options.group_rank,
        world_size=options.group_size,
        timeout=options.timeout,
        # The default group has no list of ranks, and its name is a number.
        name=options.group_id if options.global_ranks_in_group else "world",
        global_ranks=options.global_ranks_in_group,
    )


def ProcessGroup(store, rank, size, timeout=dist.default_pg_timeout):
    """Returns a backend for libraries that make groups themselves, as ProcessGroupGloo does.

    Groups that share a store need prefixes of their own: torch.distributed.PrefixStore.
    """
    return _bridge.create(
        store=store, rank=rank, world_size=size, timeout=timeout, name="world", global_ranks=[]
    )


def register():
    """Registers the backend with torch.distributed. The entry point calls it."""
    if "EVENKEEL" not in dist.Backend._plugins:
        dist.Backend.register_backend("evenkeel", _create, extended_api=True, devices=["cpu"])


if not hasattr(dist.Backend, "_ensure_backend_registered"):
    register()  # Before 2.14 torch looks for no entry point.


def make_default():
    """Makes evenkeel the backend of the CPU for groups that are made without a name of one.

    init_process_group(), DeviceMesh, FSDP and frameworks that ask torch for the name then use it.
    """
    register()
    dist.Backend.default_device_backend_map["cpu"] = "evenkeel"  # register_backend() does not.


def replace_gloo():
    """Makes groups that ask for gloo use evenkeel on the CPU.

    It has effect in this process and in processes that inherit its environment later, so call it
    before a fork server starts. get_backend() returns "gloo" for such a group. Groups that exist
    stay as they are.
    """
    evenkeel_c10d_autoload.replace()
    os.environ[evenkeel_c10d_autoload.VARIABLE] = "1"


def __getattr__(name):
    # Imported when it is needed: this module is imported while torch.distributed is.
    if name == "Join":
        from .join import Join

        return Join
    if name == "BalancedSampler":
        from ._balance import BalancedSampler

        return BalancedSampler
    if name == "watch":
        from ._watch import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _backend_of(group):
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("there is no default group yet: call init_process_group() first")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group")
    backend = group._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.


def transport(group=None):
    """Returns how a group's ranks are connected: "shm", "tcp", "hierarchical" or "local".

    Raises ValueError on a rank that is not a member of the group, or before there is a group.
    """
    return _bridge.transport(_backend_of(group))


def flight_json(group=None):
    """Returns the group's last operations as JSON."""
    return _bridge.flight_json(_backend_of(group))


def _error_of_exit():
    """Returns the exception with which the program ends, or None."""
    # A process of multiprocessing comes here while its exception is on the way.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return None
        error = error.__context__ or error  # As multiprocessing.spawn ends.
    return None if hasattr(sys, "ps1") else error  # Interactive: the session goes on.


def _reason_of_exit():
    """Returns the exception with which the program ends, as a sentence for the peers; or ""."""
    error = _error_of_exit()
    if error is None or isinstance(error, Error):
        return ""
    return f"the program ended with {_described(error)}"


def _reason_of_abort():
    """Returns the exception that the caller of abort() handles, for the peers; or ""."""
    error = sys.exc_info()[1]
    return "" if error is None else f", handling {_described(error)}"


_bridge.set_reason_of_abort(_reason_of_abort)


def _described(error):
    frame = _innermost_of_program(traceback.extract_tb(error.__traceback__))
    place = f" ({frame.filename}:{frame.lineno})" if frame else ""
    text = f"{type(error).__name__}: {error}"[:_LONGEST_REASON] + place
    return text.encode("utf-8", "backslashreplace").decode()


def _innermost_of_program(frames):
    """Returns the innermost frame outside of torch and of this package, or None."""
    inside = (
        os.path.dirname(torch.__file__),
        os.path.dirname(__file__),
        evenkeel_c10d_autoload.__file__,
    )
    return next((f for f in reversed(frames) if not f.filename.startswith(inside)), None)


def _at_exit(owner, function):
    """Calls `function` at the end of the process; and of those that multiprocessing makes of it.

    Returns a function that cancels it in this process.
    """
    atexit.register(function)

    # They do not run what atexit has, and forget the finalizers of others.
    def finalize(_owner):
        return multiprocessing.util.Finalize(None, function, exitpriority=0)

    finalizer = finalize(owner)
    multiprocessing.util.register_after_fork(owner, finalize)

    def cancel():
        atexit.unregister(function)
        finalizer.cancel()

    return cancel


def _leave_all():
    """Leaves the groups that the program has not destroyed.

    Peers that need nothing more of this rank are not disturbed. If the program ends with an
    exception, the groups end with it, and the peers get its text at once.
    """
    _bridge.leave_all(_reason_of_exit(), _EXIT_TIMEOUT)
    if isinstance(_error_of_exit(), Error):
        time.sleep(_MOMENT_S)


_at_exit(_bridge, _leave_all)
