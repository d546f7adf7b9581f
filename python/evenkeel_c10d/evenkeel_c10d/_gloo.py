"""replace_gloo: groups that ask for gloo use evenkeel for tensors of the CPU.

All groups of init_process_group() and new_group() are made by torch's `_new_process_group_helper`,
which evenkeel_c10d_autoload replaces by `make_group`. Code that constructs ProcessGroupGloo itself,
as RPC and the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL do, still gets Gloo.

Inside of torch the backend keeps its own BackendType and name: torch's C++ takes a backend of the
type GLOO for an object of ProcessGroupGloo (DistributedDataParallel logs its number of threads).
"""

import inspect
import logging

import torch
from torch.distributed import distributed_c10d as c10d

from . import __version__, _backend_of, register, transport

_logger = logging.getLogger("evenkeel_c10d")
_is_announced = False


def make_group(helper, *args, **kwargs):
    """Calls torch's `helper`, with other backends where the CPU's would be gloo."""
    global _is_announced
    call = inspect.signature(helper).bind(*args, **kwargs)
    asked = call.arguments["backend"]
    legs = replaced(_legs_of(asked), torch.cuda.is_available())
    if legs is None:
        return helper(*args, **kwargs)
    register()
    used = call.arguments["backend"] = _text(legs)
    made, store = helper(*call.args, **call.kwargs)
    known = c10d._world.pg_map.get(made)
    if known is None or known[0] != used:
        return made, store  # This rank is not in the group, or the group has existed.
    # Frameworks compare what get_backend() returns with a list of names.
    c10d._world.pg_map[made] = (c10d.Backend(asked), known[1])
    c10d._world.pg_backend_config[made] = _text(_legs_of(asked))
    if not _is_announced and (c10d.group.WORLD or made).rank() == 0:
        _is_announced = True
        _logger.warning("evenkeel %s (%s) answers to gloo", __version__, transport(made))
    return made, store


def replaced(legs, sees_a_gpu):
    """Returns the backends by device to use instead of `legs`, or None if the CPU's is not gloo."""
    if legs.get("cpu") != "gloo":
        return None
    others = {
        device: name
        for device, name in legs.items()
        # A bare gloo names the GPU, too, also where there is none.
        if device != "cpu" and (name != "gloo" or sees_a_gpu)
    }
    return {"cpu": "evenkeel", **others}


def _legs_of(backend):
    """Returns the names of the backends by device, as torch reads `backend`."""
    return dict(c10d.BackendConfig(backend).get_device_backend_map())


def _text(legs):
    return ",".join(f"{device}:{name}" for device, name in legs.items())


def _attach_flight_recorder(group, backend_config, global_ranks):
    """Torch takes a group that is named gloo for one that records itself; split_group() asks so."""
    legs = backend_config.get_device_backend_map()
    if legs.get("cpu") == "gloo" and _backend_of(group).name() == "evenkeel":
        backend_config = c10d.BackendConfig(_text({**legs, "cpu": "evenkeel"}))
    return _attach(group, backend_config, global_ranks)


# Torch 2.15 has it, and older ones record no backend from outside.
_attach = getattr(c10d, "_maybe_attach_flight_recorder", None)
if _attach is not None:
    c10d._maybe_attach_flight_recorder = _attach_flight_recorder
