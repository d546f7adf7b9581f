"""Replaces Gloo where EVENKEEL_REPLACE_GLOO=1; `import torch` calls `autoload` in each process.

It is the entry point of the group torch.backends, and apart from the package evenkeel_c10d, whose
import loads the bridge. An exception in it would break every `import torch`.
"""

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
        sys.stderr.write(f"evenkeel: {VARIABLE}={value} has no effect: {error!r}\n")


def replace():
    """Replaces the function by which torch makes groups. What it needs is imported by the first."""
    from torch.distributed import distributed_c10d

    helper = distributed_c10d._new_process_group_helper
    if helper.__module__ == __name__:
        return

    def new_process_group_helper(*args, **kwargs):
        from evenkeel_c10d import _gloo

        return _gloo.make_group(helper, *args, **kwargs)

    distributed_c10d._new_process_group_helper = new_process_group_helper
