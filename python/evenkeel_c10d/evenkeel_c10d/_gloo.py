"""replace_gloo: groups that ask for gloo use evenkeel for tensors of the CPU.

All groups of init_process_group() and new_group() are made by torch's `_new_process_group_helper`,
which evenkeel_c10d_autoload replaces; it calls `make_group` here. Code that constructs
ProcessGroupGloo itself, as RPC and the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL do, still gets Gloo.

Inside of torch the backend keeps its own BackendType and name: torch's C++ takes a backend of the
type GLOO for an object of ProcessGroupGloo (DistributedDataParallel logs its number of threads).
"""

import logging

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import __version__, _backend_of, register, transport

_logger = logging.getLogger("evenkeel_c10d")
_is_announced = False


def make_group(make, asked):
    """Returns make(asked), with another backend where the CPU's would be gloo."""
    global _is_announced
    legs = replaced(_legs_of(asked), _sees_a_gpu)
    if legs is None:
        return make(asked)
    register()
    existing = set(c10d._world.pg_map)
    try:
        # A bare name makes the backend the default one of the group, as a bare gloo does.
        made, store = make("evenkeel" if len(legs) == 1 else _text(legs))
    except dist.DistError as error:
        gpu = ", or without a GPU, while this one sees one" if "gloo" in legs.values() else ""
        error.args = (
            f"{error} (does a rank run without EVENKEEL_REPLACE_GLOO=1, with Gloo{gpu}?)",
        )
        raise
    if made in existing or made not in c10d._world.pg_map:
        return made, store  # The group has existed (pg_tag), or this rank is not in it.
    # Frameworks compare what get_backend() returns with a list of names.
    c10d._world.pg_map[made] = (c10d.Backend(asked), c10d._world.pg_map[made][1])
    c10d._world.pg_backend_config[made] = _text(_legs_of(asked))
    if not _is_announced and (c10d.group.WORLD or made).rank() == 0:
        _is_announced = True
        _logger.warning(
            "evenkeel: groups that ask for gloo use evenkeel %s (%s)", __version__, transport(made)
        )
    return made, store


def replaced(legs, sees_a_gpu):
    """Returns the backends by device to use instead of `legs`, or None if the CPU's is not gloo."""
    if legs.get("cpu") != "gloo":
        return None
    others = {
        device: name
        for device, name in legs.items()
        # A bare gloo names the GPU, too, also where there is none.
        if device != "cpu" and (name != "gloo" or sees_a_gpu())
    }
    return {"cpu": "evenkeel", **others}


def _sees_a_gpu():
    # It asks NVML, so that processes that this one forks can use the GPU; is_available() does not.
    return torch.cuda.device_count() > 0


def recorded_config(group, backend_config):
    """Returns the config by which torch attaches the flight recorder to `group`.

    Torch takes a group that is named gloo for one that records itself; split_group() asks so.
    """
    legs = backend_config.get_device_backend_map()
    if legs.get("cpu") == "gloo" and _backend_of(group).name() == "evenkeel":
        return c10d.BackendConfig(_text({**legs, "cpu": "evenkeel"}))
    return backend_config


def _legs_of(backend):
    """Returns the names of the backends by device, as torch reads `backend`."""
    return dict(c10d.BackendConfig(backend).get_device_backend_map())


def _text(legs):
    return ",".join(f"{device}:{name}" for device, name in legs.items())
