"""Runs a function on the ranks of a group, each in a forked process.

    run_ranks(2, lambda rank, world: dist.barrier())
"""

import datetime
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback

# `import torch` reads it, and the tests compare evenkeel with Gloo itself. A process that
# multiprocessing spawns uses the same backend as its parent.
if not getattr(multiprocessing.current_process(), "_inheriting", False):
    os.environ.pop("EVENKEEL_REPLACE_GLOO", None)

import torch
import torch.distributed as dist

import evenkeel_c10d  # noqa: F401  Once, before processes fork.

_FORK = multiprocessing.get_context("fork")


VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


def monitored_barrier(timeout=datetime.timedelta(seconds=30)):
    """Calls dist.monitored_barrier(), which before torch 2.14 refuses each backend but gloo."""
    if VERSION >= (2, 14):
        dist.monitored_barrier(timeout=timeout)
    else:
        dist.group.WORLD.monitored_barrier(timeout)


def assert_is_gloo(group):
    """Asserts that a reference is a group of Gloo itself, and not of evenkeel under its name."""
    assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)


class Ranks:
    """The processes of a group. A result is ("ok", value), ("error", text) or ("died", code)."""

    def __init__(self, world, function, *, backend="evenkeel", init=True, **options):
        # Rank 0 hosts the store, as with torchrun. A store in this process would have threads,
        # and a fork may copy a lock that one of them holds.
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = _FORK.Pipe(duplex=False)
            process = _FORK.Process(
                target=self._run,
                args=(rank, world, function, theirs, backend, init, options, listener),
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        listener.close()

    def _run(self, rank, world, function, pipe, backend, init, options, listener):
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        store = dist.TCPStore(
            "127.0.0.1",
            self.port,
            is_master=rank == 0,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if rank == 0 else None,
        )
        try:
            if init:
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=world, **options
                )
                if backend == "gloo":
                    assert_is_gloo(dist.group.WORLD)
                # A failure of a faster rank may overtake the end of the creation.
                store.set(f"created/{rank}", "")
                others = [f"created/{other}" for other in range(world)]
                store.wait(others, datetime.timedelta(seconds=30))
                result = function(rank, world)
                if dist.is_initialized():
                    dist.destroy_process_group()
            else:
                result = function(rank, world, store)
            pipe.send_bytes(pickle.dumps(("ok", result)))
        except BaseException:
            pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self.processes[rank].pid, number)

    def results(self, timeout=60):
        """Waits for all processes, and kills those that are left at the timeout."""
        deadline = time.monotonic() + timeout
        results = []
        for pipe, process in zip(self.pipes, self.processes):
            try:
                if not pipe.poll(max(0, deadline - time.monotonic())):
                    results.append(("error", f"no result within {timeout} s"))
                    continue
                results.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                process.join()
                results.append(("died", process.exitcode))
        for process in self.processes:
            process.join(max(1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
                results.append(("error", f"process {process.pid} did not end"))
        return results


def run_ranks(world, function, **options):
    """Returns what `function(rank, world)` returned, by rank; fails if a rank failed."""
    timeout = options.pop("timeout_s", 60)
    results = Ranks(world, function, **options).results(timeout)
    bad = [f"rank {r} of {world}: {kind}: {v}" for r, (kind, v) in enumerate(results) if kind != "ok"]
    if bad:
        raise AssertionError("\n".join(bad))
    return [value for _, value in results]
