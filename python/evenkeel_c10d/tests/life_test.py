"""How groups are made and how they end."""

import atexit
import concurrent.futures
import datetime
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

from groups import (  # Before torch: it unsets EVENKEEL_REPLACE_GLOO.
    VERSION,
    Ranks,
    monitored_barrier,
    run_ranks,
)
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import evenkeel_c10d


def total(group=None):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return int(tensor[0])


def many_groups(rank, world):
    groups = []
    for i in range(30):
        members = sorted({i % world, (i + 1) % world})
        group = dist.new_group(members)
        if rank in members:
            assert total(group) == len(members)
            groups.append((i, group))
    for _, group in groups:
        assert total(group) == dist.get_world_size(group)
    for i, group in groups:
        if i % 3 == 0:
            dist.destroy_process_group(group)
    assert total() == world
    for i, group in groups:
        if i % 3 != 0:
            assert total(group) == dist.get_world_size(group)


def members_of(group):
    """Returns the ranks whose numbers the group adds up."""
    tensor = torch.tensor(2 ** dist.get_rank())
    dist.all_reduce(tensor, group=group)
    return [rank for rank in range(dist.get_world_size()) if tensor & 2**rank]


def own_groups_alone(rank, world):
    # No rank calls new_group() for a group that it is not in, so torch's numbers of groups differ.
    rounds = [[[0, 3], [1, 2]], [[0, 1], [2, 3]], [[0, 1]], [[1, 2, 3]], [[0, 3], [1, 2]], [[0, 2]]]
    groups = []
    for lists in rounds * 2:
        for members in lists:
            if rank not in members:
                continue
            for local in (False, True):
                group = dist.new_group(members, use_local_synchronization=local)
                assert members_of(group) == members, (members_of(group), members)
                groups.append((members, group))
    for members, group in groups:
        assert members_of(group) == members
    inner = dist.split_group(split_ranks=[[0, 3], [1, 2]])
    assert members_of(inner) == ([0, 3] if rank in (0, 3) else [1, 2])
    assert members_of(dist.new_group()) == list(range(world))


def unsorted_and_nested(rank, world):
    mine = [2, 0] if rank in (0, 2) else [3, 1]
    group = dist.new_group(mine, sort_ranks=False)
    assert members_of(group) == sorted(mine) and dist.get_process_group_ranks(group) == mine
    inner = dist.split_group(group, [[1, 0]])
    assert members_of(inner) == sorted(mine)


def no_group_without_descriptors(is_without):
    """Its other ranks get the error of those that are without."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if is_without:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    begin = time.monotonic()
    try:
        dist.new_group(backend="evenkeel")
    except evenkeel_c10d.Error as error:
        assert "the limit of the process is 0" in str(error), error
    else:
        raise AssertionError("the group was made without descriptors")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    assert time.monotonic() - begin < 10


def a_group_fails_on_one_rank(rank, world):
    for without in range(world):
        no_group_without_descriptors(rank == without)
        assert total(dist.new_group()) == total() == world


def threads_make_groups(rank, world):
    def make(peer):
        for _ in range(3):
            group = dist.new_group(sorted([rank, peer]), use_local_synchronization=True)
            assert members_of(group) == sorted([rank, peer])

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(make, [peer for peer in range(world) if peer != rank]))


def beside_another_backend(rank, world, store):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    # Loads the backend's files, and leaves nothing to use again.
    alone = dist.new_group([rank], backend="evenkeel", use_local_synchronization=True)
    dist.destroy_process_group(alone)
    no_group_without_descriptors(rank == world - 1)
    before = open_files()
    groups = [dist.new_group(backend="evenkeel") for _ in range(20)]
    assert all(total(group) == world for group in groups)
    per_group = (open_files() - before) / len(groups)
    assert per_group < 3 + world, per_group  # Gloo has 5 with 2 ranks, and 6 with 3.


def open_files():
    return len(os.listdir("/proc/self/fd"))


def rank_0_is_lost(rank, world, store):
    # It hosts the server of some groups, and of others it does not.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    first = dist.new_group([0, 1], backend="evenkeel")
    others = dist.new_group([1, 2], backend="evenkeel")
    assert rank == 2 or total(first) == 2
    assert rank == 0 or total(others) == 2
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        try:
            while True:
                total(first)
        except evenkeel_c10d.Error as error:
            assert error.kind == "lost" and error.ranks == (0,), error
    assert total(others) == 2


def a_rank_is_lost(rank, world, store):
    dist.init_process_group("evenkeel", store=store, rank=rank, world_size=world)
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (0, 2), (1, 2))}
    assert all(members_of(group) == list(pair) for pair, group in pairs.items() if rank in pair)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for group in (dist.group.WORLD, pairs[rank, 2]):
        try:
            while True:
                total(group)
        except evenkeel_c10d.Error as error:
            assert error.kind == "lost", error
    assert total(pairs[0, 1]) == 2
    assert total(dist.new_group([0, 1])) == 2
    # Not over the store, which ends with rank 0.
    dist.barrier(pairs[0, 1])


def split_groups(rank, world):
    ranks = [[r for r in range(world) if r % 2 == parity] for parity in range(2)]
    group = dist.split_group(split_ranks=[r for r in ranks if r])
    assert total(group) == len(ranks[rank % 2])
    assert dist.get_backend(group) == "evenkeel"
    objects = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, rank, group=group)
    assert objects == ranks[rank % 2], objects


def again(rank, world, store):
    # The same store, with what the groups before have left in it.
    for i in range(5):
        dist.init_process_group("evenkeel", store=store, rank=rank, world_size=world)
        assert total() == world
        assert total(dist.new_group()) == world
        dist.destroy_process_group()


def refuses_transport(group=None):
    try:
        evenkeel_c10d.transport(group)
    except ValueError as error:
        return str(error)
    raise AssertionError("a rank without the group knows its transport")


def mixed(rank, world, store):
    assert "init_process_group" in refuses_transport()
    dist.init_process_group("cpu:evenkeel", store=store, rank=rank, world_size=world)
    assert total() == world
    assert evenkeel_c10d.transport() in ("shm", "local")
    first = dist.new_group([0])
    assert rank == 0 or "not a member" in refuses_transport(first)
    assert "all_reduce" in evenkeel_c10d.flight_json()
    dist.destroy_process_group()


def ends_without_destroying(rank, world, store):
    dist.init_process_group("evenkeel", store=store, rank=rank, world_size=world)
    assert total() == world
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
    if rank == 0:
        work.wait()


def used_after_end(rank, world):
    group = dist.distributed_c10d._get_default_group()
    work = dist.barrier(async_op=True)
    dist.destroy_process_group()
    assert work.wait()
    try:
        group.barrier()
    except RuntimeError as error:
        assert "has been destroyed" in str(error), error
    else:
        raise AssertionError("a destroyed group works")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((2,), float(index))


def with_workers(rank, world):
    for _ in range(2):
        for batch in DataLoader(Numbers(), num_workers=2, batch_size=5):
            expected = batch * world
            dist.all_reduce(batch)
            assert torch.equal(batch, expected)


def in_forked_child(rank, world):
    read, write = os.pipe()
    tensor = torch.zeros(1)
    message = dist.irecv(tensor, 1 - rank)
    if os.fork() == 0:
        for function in (dist.barrier, monitored_barrier, evenkeel_c10d.flight_json):
            try:
                function()
            except RuntimeError as error:
                os.write(write, str(error).encode())
        dist.distributed_c10d._get_default_group().abort()
        dist.destroy_process_group()
        atexit._run_exitfuncs()  # Must not leave the parent's group.
        os._exit(0)
    os.wait()
    text = os.read(read, 1000).decode()
    assert text.count("forked") == 3, text
    assert total() == world
    dist.send(torch.ones(1), 1 - rank)
    message.wait()
    assert tensor == 1


def with_a_receive_that_nobody_answers(rank, world, store):
    dist.init_process_group("evenkeel", store=store, rank=rank, world_size=world)
    assert total() == world
    if rank == 0:
        dist.irecv(torch.zeros(1), 1)
    begin = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 8


def with_a_callback_that_does_not_end(rank, world):
    future = dist.irecv(torch.zeros(1), 1 - rank).get_future()
    started = threading.Event()
    future.then(lambda _: (started.set(), time.sleep(40)))
    dist.barrier()  # Both have attached it, so that it runs beside the program.
    dist.send(torch.zeros(1), 1 - rank)
    assert started.wait(20)
    begin = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 15


def dropped(rank, world, store):
    """The group goes with its last reference, without a call that ends it."""
    # The first group also starts a thread that stays (comm/base/clock.h).
    for name in "first", "second":
        before = threads()
        backend = evenkeel_c10d.ProcessGroup(
            dist.PrefixStore(name, store), rank, world, datetime.timedelta(seconds=20)
        )
        backend.barrier().wait()
        assert threads() > before
        del backend
        left = before + 1 if name == "first" else before
        deadline = time.monotonic() + 10
        while threads() > left and time.monotonic() < deadline:
            time.sleep(0.1)
        assert threads() == left, (name, before, threads())


def threads():
    return len(os.listdir("/proc/self/task"))


PROGRAM = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("{backend}")
tensor = torch.ones(2)
dist.all_reduce(tensor)
os.write(1, b"sum %d;" % int(tensor[0]))  # At once: the ranks share the output.
{end}
"""

# From here on no thread starts in the process: no machine has a stack of a petabyte.
NO_THREADS = """
import ctypes
libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
assert libc.pthread_attr_init(attributes) == 0
assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 50)) == 0
assert libc.pthread_setattr_default_np(attributes) == 0
"""

UNDER_THE_NAME_GLOO = """
dist.destroy_process_group()
dist.init_process_group("gloo")
dist.all_reduce(tensor.fill_(1))
import evenkeel_c10d

os.write(1, f"{dist.get_backend()} {evenkeel_c10d.transport()} {int(tensor[0])};".encode())
"""


def torchrun(world, backend="evenkeel", end=""):
    """Runs PROGRAM by torchrun; returns its exit status and its output."""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "program.py"
        # Before 2.14 torch looks for no entry point.
        begin = "" if VERSION >= (2, 14) else "import evenkeel_c10d\n"
        program.write_text(begin + PROGRAM.format(backend=backend, end=end))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world), str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr


SPLITS = unittest.skipIf(VERSION < (2, 15), "split_group() of older versions needs a GPU")


class LifeTest(unittest.TestCase):
    def run_without_init(self, world, function):
        for rank, (kind, value) in enumerate(Ranks(world, function, init=False).results(60)):
            self.assertEqual(kind, "ok", f"rank {rank} of {world}: {value}")

    def test_many_groups(self):
        for world in (2, 4):
            run_ranks(world, many_groups)

    @SPLITS
    def test_ranks_make_only_the_groups_that_they_are_in(self):
        run_ranks(4, own_groups_alone)

    @SPLITS
    def test_groups_of_any_members(self):
        run_ranks(4, unsorted_and_nested)

    def test_a_group_that_fails_on_one_rank(self):
        for world in (2, 3):
            run_ranks(world, a_group_fails_on_one_rank)

    def test_threads_make_groups(self):
        run_ranks(4, threads_make_groups)

    def test_groups_beside_another_backend(self):
        for world in (2, 3):
            self.run_without_init(world, beside_another_backend)

    def test_a_lost_rank_ends_its_groups_only(self):
        results = Ranks(3, a_rank_is_lost, init=False).results(60)
        self.assertEqual([kind for kind, _ in results], ["ok", "ok", "died"], results)
        results = Ranks(3, rank_0_is_lost, init=False).results(60)
        self.assertEqual([kind for kind, _ in results], ["died", "ok", "ok"], results)

    @SPLITS
    def test_split_groups(self):
        for world in (2, 3, 4):
            run_ranks(world, split_groups)

    def test_destroy_and_init_again(self):
        for world in (1, 2, 3):
            self.run_without_init(world, again)

    def test_backend_for_a_device(self):
        self.run_without_init(2, mixed)

    def test_ends_without_destroying(self):
        for world in (1, 2, 4):
            self.run_without_init(world, ends_without_destroying)

    def test_refuses_use_after_the_end(self):
        run_ranks(2, used_after_end)

    def test_workers_of_a_data_loader(self):
        run_ranks(2, with_workers)

    def test_a_forked_child_leaves_the_group_alone(self):
        run_ranks(2, in_forked_child)

    def test_a_receive_that_nobody_answers_does_not_delay_the_end(self):
        self.run_without_init(2, with_a_receive_that_nobody_answers)

    def test_a_callback_that_does_not_end_does_not_hold_the_end(self):
        run_ranks(2, with_a_callback_that_does_not_end, timeout_s=35)

    def test_a_dropped_group_ends(self):
        self.run_without_init(2, dropped)

    def test_torchrun_needs_no_import(self):
        with unittest.mock.patch.dict(os.environ, EVENKEEL_REPLACE_GLOO="1"):
            status, output = torchrun(2, end=UNDER_THE_NAME_GLOO)
        self.assertEqual((status, output.count("sum 2")), (0, 2), output)
        self.assertEqual((status, output.count("gloo shm 2;")), (0, 2), output)
        self.assertEqual(output.count("gloo use evenkeel"), 1, output)

    def test_ends_where_no_thread_can_start(self):
        status, output = torchrun(2, end="group = dist.new_group(); dist.barrier(group)" + NO_THREADS)
        self.assertEqual((status, output.count("sum 2")), (0, 2), output)
        self.assertNotIn("Resource temporarily unavailable", output)

    def test_an_exception_reaches_the_other_ranks(self):
        end = 'if dist.get_rank() == 1: raise ValueError("no such file")\ndist.barrier()'
        status, output = torchrun(2, end=end)
        self.assertNotEqual(status, 0)
        self.assertRegex(
            output, r"rank0.*Error: .*ValueError: no such file \(/.*/program.py:\d+\)", output
        )


if __name__ == "__main__":
    unittest.main()
