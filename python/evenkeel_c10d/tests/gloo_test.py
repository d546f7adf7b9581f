"""evenkeel under the name gloo: each row of the table of docs/pytorch.md, beside Gloo itself."""

import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

from groups import VERSION, Ranks  # Before torch: it unsets EVENKEEL_REPLACE_GLOO.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.distributed.nn.functional
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

import evenkeel_c10d
from evenkeel_c10d import _gloo

GLOO, EVENKEEL = "Gloo", "evenkeel"
_flight = torch._C._distributed_c10d._dump_fr_trace_json

SPLITS = VERSION >= (2, 15)  # split_group() of older versions needs a GPU.


def actual(group=None):
    """Returns which of both a group uses for tensors of the CPU."""
    group = group or dist.group.WORLD
    try:
        assert evenkeel_c10d.transport(group) in ("shm", "local")
        return EVENKEEL
    except TypeError:
        return GLOO


def total(rank, group=None):
    tensor = torch.tensor([rank + 1.0, 2.0**rank])
    dist.all_reduce(tensor, group=group)
    return tensor


def train(model, optimizer):
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in model.parameters()
    ]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


# ---- Rows that share a group. They return the same with Gloo and with evenkeel. ----


def names(rank, world):
    assert dist.get_backend() is dist.Backend.GLOO
    return dist.get_backend(), dist.get_backend_config()


def monitored_barrier(rank, world):
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    dist.monitored_barrier(wait_all_ranks=True)


def object_collectives(rank, world):
    gathered = [None] * world
    dist.all_gather_object(gathered, {"rank": rank})
    sent = [("from", rank)]
    dist.broadcast_object_list(sent, src=1)
    at_0 = [None] * world if rank == 0 else None
    dist.gather_object(rank, at_0, dst=0)
    scattered = [None]
    dist.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None, src=0)
    passed = [rank]
    if rank == 0:
        dist.send_object_list(passed, dst=1)
    else:
        dist.recv_object_list(passed, src=0)
    return gathered, sent, at_0, scattered, passed


def new_groups(rank, world):
    results = []
    for backend in (None, "gloo", "GLOO", dist.Backend.GLOO, "cpu:gloo", "cpu:gloo,cuda:gloo"):
        group = dist.new_group([0, 1], backend=backend)
        assert actual(group) == actual(), backend
        results += [dist.get_backend(group), total(rank, group)]
    subgroups = [dist.new_group([one], backend="gloo") for one in range(world)]
    tagged = dist.distributed_c10d._new_group_with_tag(backend="gloo", pg_tag="same")
    assert tagged is dist.distributed_c10d._new_group_with_tag(backend="gloo", pg_tag="same")
    return results, total(rank, subgroups[rank]), dist.get_backend(tagged)


def split_groups(rank, world):
    results = []
    for backend in (None, "gloo"):
        group = dist.split_group(split_ranks=[[1, 0]], backend=backend)
        assert actual(group) == actual()
        results += [dist.get_backend(group), dist.get_rank(group), total(rank, group)]
    alone = dist.split_group(split_ranks=[[0], [1]], timeout=datetime.timedelta(seconds=20))
    return results, total(rank, alone)


def ddp(rank, world):
    model = DistributedDataParallel(make_model())
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def device_mesh(rank, world):
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names]
    assert [actual(group) for group in groups] == [actual()] * 2
    model = fully_shard(make_model(), mesh=mesh["shard"])
    weights = train(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return [dist.get_backend(group) for group in groups], weights


def zero(rank, world):
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    weights = train(model, optimizer)
    optimizer.consolidate_state_dict(0)
    # Torch refuses its overlap with Gloo by the name.
    try:
        hook_with_zero_step(allreduce_hook, model, optimizer)
    except (RuntimeError, ValueError) as error:
        refusal = str(error)
    else:
        raise AssertionError("torch accepts hook_with_zero_step with gloo")
    return weights, refusal


def differentiable(rank, world):
    tensor = torch.arange(4.0, requires_grad=True)
    outputs = [torch.zeros(2) for _ in range(world)]
    received = torch.distributed.nn.functional.all_to_all(outputs, list(tensor.chunk(world)))
    (torch.stack(list(received)) * (rank + 1)).sum().backward()
    return tensor.grad


ROWS = (
    names,
    monitored_barrier,
    object_collectives,
    new_groups,
    *([split_groups] if SPLITS else []),
    ddp,
    device_mesh,
    zero,
    differentiable,
)


@contextlib.contextmanager
def group_of(store, rank, world, backend="gloo", **options):
    prefixed = dist.PrefixStore(f"{backend} {sorted(options)}", store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rows(rank, world, store):
    with group_of(store, rank, world):
        assert actual() == GLOO
        return {row.__name__: row(rank, world) for row in ROWS}


def rows_replaced(rank, world, store):
    evenkeel_c10d.replace_gloo()
    evenkeel_c10d.replace_gloo()  # Once more changes nothing.
    with group_of(store, rank, world):
        assert actual() == EVENKEEL
        results = {row.__name__: row(rank, world) for row in ROWS}
        if VERSION >= (2, 15):  # Older versions record torch's own backends alone.
            check_flight_records(rank)
        # Torch's C++ takes a backend of the type GLOO for an object of ProcessGroupGloo.
        assert dist.group.WORLD._get_backend_name() == "custom", dist.group.WORLD._get_backend_name()
        return results


def check_flight_records(rank):
    """Torch records no group that is named gloo, but these, also if they are split."""

    def recorded():
        return len(json.loads(_flight(backend="evenkeel")).get("entries", []))

    for group in (dist.group.WORLD, dist.split_group(split_ranks=[[0, 1]])):
        before = recorded()
        total(rank, group)
        assert recorded() == before + 1, (before, recorded())
    assert not json.loads(_flight(backend="gloo")).get("entries")


def check_refusals(rank, world, store):
    options = dist.ProcessGroupGloo._Options()
    all_refused = [{"pg_options": options}]
    if VERSION >= (2, 14):
        all_refused.append({"enable_reconfigure": True})
    for refused in all_refused:
        try:
            with group_of(store, rank, world, **refused):
                pass
        except NotImplementedError as error:
            assert "evenkeel: " in str(error) and next(iter(refused)) in str(error), error
        else:
            raise AssertionError(refused)
    with group_of(store, rank, world):
        calls = [lambda: dist.new_group(backend="gloo", pg_options=options)]
        if SPLITS:
            calls.append(lambda: dist.split_group(split_ranks=[[0, 1]], pg_options=options))
        for call in calls:
            try:
                call()
            except NotImplementedError as error:
                assert "Gloo's pg_options" in str(error), error
            else:
                raise AssertionError("Gloo's options were taken")
        assert total(rank)[0] == 3


def check_with_debug_level_detail(rank, world, store):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with group_of(store, rank, world):
        assert actual() == EVENKEEL and total(rank)[0] == 3
        wrapper = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert wrapper.wrapped_pg.name() == "evenkeel"
        try:
            dist.all_reduce(torch.ones(1 + rank))
        except RuntimeError as error:
            assert "Detected mismatch between collectives on ranks" in str(error), error
        else:
            raise AssertionError("the checks of DETAIL found nothing")
    dist.set_debug_level(dist.DebugLevel.OFF)


def check_rpc(rank, world, path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    assert rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), rank))[0] == 1 + rank
    rpc.shutdown()


def check_beside_a_gpu(rank, world, store):
    """Torch believes that there is a GPU: the group has a Gloo for its tensors."""
    with unittest.mock.patch("torch.cuda.device_count", lambda: 1):
        with group_of(store, rank, world, timeout=datetime.timedelta(seconds=30)):
            assert actual() == EVENKEEL and total(rank)[0] == 3
            on_gpu = dist.group.WORLD._get_backend(torch.device("cuda"))
            assert isinstance(on_gpu, dist.ProcessGroupGloo)
            assert names(rank, world) == ("gloo", "cpu:gloo,cuda:gloo")
            assert total(rank, dist.new_group())[0] == 3
            if SPLITS:
                assert total(rank, dist.split_group(split_ranks=[[0, 1]]))[0] == 3
            dist.barrier()
            dist.monitored_barrier()


def check_beside_another_backend(rank, world, store):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  In the place of NCCL.

    with group_of(store, rank, world, "cpu:gloo,cuda:fake"):
        assert actual() == EVENKEEL and total(rank)[0] == 3
        assert dist.get_backend() == dist.get_backend_config() == "cpu:gloo,cuda:fake"
        group = dist.new_group()
        assert actual(group) == EVENKEEL and dist.get_backend(group) == "cpu:gloo,cuda:fake"
    with group_of(store, rank, world, "cuda:fake"):
        assert actual(dist.new_group(backend="gloo")) == EVENKEEL


def beside_wrappers(rank, world, store):
    """Other libraries wrap the function by which torch makes groups, in this or in that order."""
    c10d = dist.distributed_c10d
    for name in ("first", "second"):
        c10d._new_process_group_helper = wrapper_of(c10d._new_process_group_helper)
        evenkeel_c10d.replace_gloo()
        with group_of(dist.PrefixStore(name, store), rank, world):
            assert actual() == EVENKEEL and total(rank)[0] == 3
            assert actual(dist.new_group(backend="gloo")) == EVENKEEL
    for unknown in (None, lambda group_size, name: None):
        with unittest.mock.patch.object(c10d, "_new_process_group_helper", unknown):
            try:
                evenkeel_c10d.replace_gloo()
            except RuntimeError as error:
                assert "cannot take the place of gloo" in str(error), error
            else:
                raise AssertionError(unknown)


def wrapper_of(helper):
    return lambda *args, **kwargs: helper(*args, **kwargs)


def only_rank_1_replaces(rank, world, store):
    """Rank 0, which hosts the store, ends at its timeout."""
    if rank == 1:
        evenkeel_c10d.replace_gloo()
    try:
        with group_of(store, rank, world, timeout=datetime.timedelta(seconds=2)):
            raise AssertionError("Gloo and evenkeel have met")
    except RuntimeError as error:
        return type(error), str(error)


def only_rank_1_sees_a_gpu(rank, world, store):
    evenkeel_c10d.replace_gloo()
    with unittest.mock.patch("torch.cuda.device_count", lambda: rank):
        try:
            with group_of(store, rank, world, timeout=datetime.timedelta(seconds=3)):
                dist.barrier()
        except dist.DistError as error:
            return str(error)
    raise AssertionError("no error")


def an_existing_group_keeps_its_name(rank, world, store):
    evenkeel_c10d.replace_gloo()
    with group_of(store, rank, world, "evenkeel"):
        tagged = dist.distributed_c10d._new_group_with_tag
        group = tagged(backend="evenkeel", pg_tag="tag")
        assert tagged(backend="gloo", pg_tag="tag") is group
        assert dist.get_backend(group) == "evenkeel"


def check_without_a_name(rank, world, store):
    prefixed = dist.PrefixStore("without a name", store)
    dist.init_process_group(store=prefixed, rank=rank, world_size=world)
    assert actual() == EVENKEEL and total(rank)[0] == 3
    dist.destroy_process_group()


def replaced(rank, world, store, folder):
    evenkeel_c10d.replace_gloo()
    check_refusals(rank, world, store)
    check_with_debug_level_detail(rank, world, store)
    check_beside_a_gpu(rank, world, store)
    check_beside_another_backend(rank, world, store)
    check_without_a_name(rank, world, store)
    check_rpc(rank, world, f"{folder}/rpc")


def default(rank, world, store):
    evenkeel_c10d.make_default()
    check_without_a_name(rank, world, store)
    assert dist.get_default_backend_for_device("cpu") == "evenkeel"
    with group_of(store, rank, world):
        assert actual() == GLOO
    # These make the default group, from the environment, as under torchrun.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    mesh = init_device_mesh("cpu", (world,))
    assert actual(mesh.get_group()) == EVENKEEL
    dist.destroy_process_group()
    fully_shard(make_model())
    assert actual() == EVENKEEL
    dist.destroy_process_group()


class Writer(checkpoint.FileSystemWriter):
    """Leaves a file that says what the process that saves uses."""

    def prepare_global_plan(self, plans):
        pathlib.Path(self.path, "saved_over").write_text(f"{os.getpid()} {actual()}")
        return super().prepare_global_plan(plans)


def saves_in_another_process(rank, world, store, folder):
    evenkeel_c10d.replace_gloo()
    with group_of(store, rank, world):
        state = {"weights": torch.arange(6.0) + 1, "rank": torch.tensor(rank)}
        checkpoint.async_save(
            state,
            storage_writer=Writer(folder),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result()
        dist.barrier()
        loaded = {"weights": torch.zeros(6)}
        checkpoint.load(loaded, checkpoint_id=folder)
        assert torch.equal(loaded["weights"], state["weights"])
        pid, used = pathlib.Path(folder, "saved_over").read_text().split()
        assert int(pid) != os.getpid() and used == EVENKEEL, (pid, used)


# The program does not import evenkeel. Its ranks are started by spawn and by a fork server.
PROGRAM = """
import multiprocessing
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing


def rank_main(rank, path, results):
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    name = dist.group.WORLD._get_backend(torch.device("cpu")).name()
    results.put((rank, name, tensor.tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        results = multiprocessing.get_context(method).SimpleQueue()
        torch.multiprocessing.start_processes(
            rank_main, (f"{sys.argv[1]}/{method}", results), nprocs=2, start_method=method
        )
        print(sorted(results.get() for _ in range(2)))
"""

IMPORTS = """
import sys, time
import torch

def milliseconds():
    sys.modules.pop("evenkeel_c10d_autoload")
    begin = time.thread_time()
    from evenkeel_c10d_autoload import autoload
    autoload()
    return 1e3 * (time.thread_time() - begin)

assert not any(name.startswith("evenkeel_c10d.") for name in sys.modules)
assert "evenkeel_c10d" not in sys.modules and "evenkeel_c10d_autoload" in sys.modules
print(min(milliseconds() for _ in range(10)))
"""


OTHER_GROUPS = """
import sys
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

def no_search():
    raise AssertionError("looked for a GPU")

torch.cuda.is_available = torch.cuda.device_count = no_search
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
dist.new_group(backend="cpu:fake")
assert hasattr(dist.distributed_c10d._new_process_group_helper, "replaces_gloo")
assert "evenkeel_c10d" not in sys.modules
"""


def run_python(*arguments, **variables):
    """Returns what a new Python prints, and what it logs."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout, done.stderr


class GlooTest(unittest.TestCase):
    def run_ranks(self, function, *arguments):
        def run(rank, world, store):
            return function(rank, world, store, *arguments)

        results = Ranks(2, run, init=False).results(120)
        for rank, (kind, value) in enumerate(results):
            self.assertEqual(kind, "ok", f"rank {rank}: {value}")
        return [value for _, value in results]

    def assert_same(self, got, expected):
        got, got_form = tree_flatten(got)
        expected, form = tree_flatten(expected)
        self.assertEqual(got_form, form)
        for one, other in zip(got, expected):
            if isinstance(other, torch.Tensor):
                self.assertTrue(torch.equal(one, other), f"{one} instead of {other}")
            else:
                self.assertEqual(one, other)

    def test_rows_are_as_with_gloo(self):
        for expected, got in zip(self.run_ranks(rows), self.run_ranks(rows_replaced)):
            for row in expected:
                with self.subTest(row):
                    self.assert_same(got[row], expected[row])

    def test_groups_of_other_kinds(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_ranks(replaced, folder)

    def test_wrappers_of_other_libraries(self):
        self.run_ranks(beside_wrappers)

    def test_an_existing_group_keeps_its_name(self):
        self.run_ranks(an_existing_group_keeps_its_name)

    def test_the_error_asks_for_ranks_with_gloo(self):
        _, (kind, message) = self.run_ranks(only_rank_1_replaces)
        self.assertIs(kind, evenkeel_c10d.Error, message)
        self.assertIn("does a rank run without EVENKEEL_REPLACE_GLOO=1, with Gloo?", message)

    def test_the_error_asks_for_ranks_without_a_gpu(self):
        without, with_gpu = self.run_ranks(only_rank_1_sees_a_gpu)
        self.assertIn("or without a GPU, while this one sees one?", with_gpu)
        self.assertIn("rank 1", without)

    def test_groups_of_other_backends_load_nothing(self):
        run_python("-c", OTHER_GROUPS, EVENKEEL_REPLACE_GLOO="1")

    def test_default(self):
        self.run_ranks(default)

    def test_a_checkpoint_is_saved_by_another_process(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_ranks(saves_in_another_process, folder)

    def test_legs(self):
        for legs, sees_a_gpu, expected in (
            ({"cpu": "gloo", "cuda": "gloo"}, False, {"cpu": "evenkeel"}),
            ({"cpu": "gloo", "cuda": "gloo"}, True, {"cpu": "evenkeel", "cuda": "gloo"}),
            ({"cpu": "gloo", "cuda": "nccl"}, True, {"cpu": "evenkeel", "cuda": "nccl"}),
            ({"cpu": "gloo", "cuda": "nccl"}, False, {"cpu": "evenkeel", "cuda": "nccl"}),
            ({"cuda": "nccl"}, True, None),
            ({"cuda": "gloo"}, True, None),
            ({"cpu": "evenkeel", "cuda": "gloo"}, True, None),
        ):
            self.assertEqual(_gloo.replaced(legs, lambda: sees_a_gpu), expected, legs)

    def test_run_reaches_spawned_processes_and_those_of_a_fork_server(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "program.py")
            program.write_text(PROGRAM)
            output, _ = run_python("-m", "evenkeel_c10d.run", str(program), folder)
        ranks = [(rank, EVENKEEL, [3.0]) for rank in range(2)]
        self.assertEqual(output, f"{ranks}\n" * 2)

    def test_an_import_of_torch_costs_nothing_where_the_variable_is_unset(self):
        output, log = run_python("-c", IMPORTS, EVENKEEL_REPLACE_GLOO="")
        self.assertEqual(log, "")
        self.assertLess(float(output), 1)
        _, log = run_python("-c", "import torch", EVENKEEL_REPLACE_GLOO="yes")
        self.assertIn("EVENKEEL_REPLACE_GLOO=yes has no effect", log)
        closed = "import os, sys; os.close(2); sys.stderr = None; import torch"
        for program in (closed, "import sys; sys.stderr.close(); import torch"):
            run_python("-c", program, EVENKEEL_REPLACE_GLOO="yes")


if __name__ == "__main__":
    unittest.main()
