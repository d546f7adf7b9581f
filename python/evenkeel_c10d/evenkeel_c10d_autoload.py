"""Replaces Gloo where EVENKEEL_REPLACE_GLOO=1; `import torch` calls `autoload` in each process.

It is the entry point of the group torch.backends, and apart from the package evenkeel_c10d, whose
import loads the bridge. An exception in it would break every `import torch`.
"""

import contextlib
import functools
import inspect
import os
import sys

VARIABLE = "EVENKEEL_REPLACE_GLOO"


def autoload():
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return
    try:
        if value != "1":
            raise ValueError("the value is neither 0 nor 1")
        replace()
    except Exception as error:
        with contextlib.suppress(Exception):  # stderr may be closed.
            sys.stderr.write(f"evenkeel: {VARIABLE}={value} has no effect: {error!r}\n")


def replace():
    """Replaces torch's functions that make a group and attach the flight recorder to it.

    The package is imported by the first group that asks for gloo: a process that makes none, or
    groups of other backends only, neither loads the bridge nor looks for a GPU.
    """
    from torch.distributed import distributed_c10d

    helper = getattr(distributed_c10d, "_new_process_group_helper", None)
    if hasattr(helper, "replaces_gloo"):
        return
    position = _position_of_backend(helper)

    @functools.wraps(helper)
    def new_process_group_helper(*args, **kwargs):
        by_name = "backend" in kwargs
        if not by_name and len(args) <= position:
            return helper(*args, **kwargs)  # It reports what is missing.
        asked = kwargs["backend"] if by_name else args[position]
        if not _may_mean_gloo(asked):
            return helper(*args, **kwargs)

        def make(backend):
            if by_name:
                return helper(*args, **{**kwargs, "backend": backend})
            return helper(*args[:position], backend, *args[position + 1 :], **kwargs)

        from evenkeel_c10d import _gloo

        return _gloo.make_group(make, asked)

    new_process_group_helper.replaces_gloo = True
    distributed_c10d._new_process_group_helper = new_process_group_helper

    # Torch 2.15 has it, and older ones record no backend from outside.
    attach = getattr(distributed_c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return

    @functools.wraps(attach)
    def maybe_attach_flight_recorder(group, backend_config, *args, **kwargs):
        if _may_mean_gloo(backend_config):
            from evenkeel_c10d import _gloo

            backend_config = _gloo.recorded_config(group, backend_config)
        return attach(group, backend_config, *args, **kwargs)

    distributed_c10d._maybe_attach_flight_recorder = maybe_attach_flight_recorder


def _position_of_backend(helper):
    """Returns the position of `backend` among the arguments of torch's function."""
    parameters = inspect.signature(helper).parameters if helper is not None else {}
    if "backend" in parameters:
        return list(parameters).index("backend")
    # The wrapper of another library passes all arguments on.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return 3
    raise RuntimeError(
        "evenkeel cannot take the place of gloo, because this torch does not make groups by "
        "_new_process_group_helper(..., backend, ...). Use a torch that docs/pytorch.md names, or "
        'call init_process_group("evenkeel").'
    )


def _may_mean_gloo(backend):
    """Returns whether a backend's name contains gloo, or torch chooses the backend itself."""
    name = str(backend or "").lower()
    return "gloo" in name or name in ("", "undefined")
