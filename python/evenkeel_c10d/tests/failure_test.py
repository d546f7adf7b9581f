"""The errors on all ranks when one of them is lost, fails, leaves, or calls something else."""

import concurrent.futures
import datetime
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import time
import unittest

import torch
import torch.distributed as dist
from groups import VERSION, Ranks, monitored_barrier, run_ranks
from torch import nn
from torch.multiprocessing import ProcessRaisedException, start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import evenkeel_c10d

WORLDS = (2, 3, 4)


def failure_of(function):
    """Returns the attributes of the Error that `function` raises, and how long that took."""
    begin = time.monotonic()
    try:
        function()
    except evenkeel_c10d.Error as error:
        assert isinstance(error, dist.DistBackendError)
        assert pickle.loads(pickle.dumps(error)).__dict__ == error.__dict__
        return {**error.__dict__, "text": str(error), "seconds": time.monotonic() - begin}
    raise AssertionError("no error")


def forever():
    while True:
        dist.all_reduce(torch.ones(1000))


def die(rank, victim):
    """Lets the rank `victim` kill itself after some operations; the others go on."""
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    # The loss of a faster rank may overtake the end of an operation.
    store = dist.distributed_c10d._get_default_store()
    if rank != victim:
        store.set(f"past/{rank}", "")
        return
    store.wait([f"past/{other}" for other in range(dist.get_world_size()) if other != rank])
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_wait(rank, world):
    die(rank, world - 1)
    return failure_of(forever)


def first_killed(rank, world):
    """The first rank hosts the hub of the group, which would tell the others who is lost."""
    die(rank, 0)
    return failure_of(forever)


def killed_with_futures(rank, world):
    die(rank, world - 1)
    future = dist.all_reduce(torch.ones(1000), async_op=True).get_future()
    failure = failure_of(future.wait)
    assert failure_of(future.wait)["ranks"] == failure["ranks"]  # Not only once.
    seen = []
    future.add_done_callback(lambda f: seen.append(failure_of(f.value)["ranks"]))
    assert seen == [failure["ranks"]], seen
    work = dist.all_reduce(torch.ones(1), async_op=True)
    failure_of(work.wait)
    assert work.is_completed() and not work.is_success()
    return failure


def killed_in_backward(rank, world):
    model = DistributedDataParallel(nn.Linear(100, 100))
    die(rank, world - 1)

    def step():
        while True:
            model(torch.ones(3, 100)).sum().backward()

    return failure_of(step)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((10,), float(index))


def killed_with_workers(rank, world):
    loader = iter(DataLoader(Numbers(), num_workers=2, batch_size=2))
    next(loader)
    die(rank, world - 1)
    return failure_of(lambda: [dist.all_reduce(batch) for batch in loader])


def disagreement(rank, world):
    def step():
        if rank == 0:
            dist.broadcast(torch.ones(4), 0)
        else:
            dist.all_reduce(torch.ones(4))

    return failure_of(step)


def disagreement_of_threads(rank, world):
    dist.all_reduce(torch.ones(4))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return pool.submit(disagreement, rank, world).result()


def deadline(rank, world):
    dist.set_timeout(datetime.timedelta(seconds=1))  # The creation may take longer.
    if rank == world - 1:
        time.sleep(4)
        return failure_of(dist.barrier)
    return failure_of(dist.barrier)


def monitored(rank, world):
    if rank == world - 1:
        time.sleep(4)
        return failure_of(dist.barrier)
    return failure_of(lambda: monitored_barrier(datetime.timedelta(seconds=1)))


def wait_timeout(rank, world):
    if rank == 0:
        work = dist.barrier(async_op=True)
        try:
            work.wait(datetime.timedelta(milliseconds=50))
        except dist.DistBackendError as error:
            assert "50 ms" in str(error), error
        else:
            raise AssertionError("no timeout")
        dist.distributed_c10d._get_default_store().set("go", "1")
        work.wait()
    else:
        dist.distributed_c10d._get_default_store().get("go")
        dist.barrier()


def two_barriers():
    dist.barrier()  # The end of a faster rank may overtake the end of this one.
    dist.barrier()


def left(rank, world, store):
    """A rank ends without destroying the group, and the others need it."""
    dist.init_process_group("evenkeel", store=store, rank=rank, world_size=world)
    if rank == world - 1:
        dist.barrier()
        return None  # The end of the process leaves.
    return failure_of(two_barriers)


def killed_while_others_wait_for_any(rank, world):
    die(rank, world - 1)
    return failure_of(lambda: dist.recv(torch.ones(1)))


def others_left(rank, world, store):
    """Only rank 0 remains, and waits for any other."""
    dist.init_process_group("evenkeel", store=store, rank=rank, world_size=world)
    dist.barrier()
    return failure_of(lambda: dist.recv(torch.ones(1))) if rank == 0 else None


def exits(rank, world, store):
    """A rank ends as one of torch.multiprocessing.spawn does whose function has failed."""
    dist.init_process_group("evenkeel", store=store, rank=rank, world_size=world)
    if rank == world - 1:
        dist.barrier()
        try:
            sys.exit(1)
        finally:
            multiprocessing.util._exit_function()

    return failure_of(two_barriers)


def spawned(rank, guilty, path):
    """As a function of torch.multiprocessing.spawn()."""
    dist.init_process_group("evenkeel", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.barrier()
    if rank == guilty:
        # The end of its process takes a while after it has left its groups.
        multiprocessing.util.Finalize(None, time.sleep, args=(0.3,), exitpriority=-1)
        raise ValueError("no such file")
    forever()


def aborts(rank, world):
    def work():
        dist.barrier()  # The abort of a faster rank may overtake its end.
        if rank == 0:
            try:
                raise ValueError("no such file")
            except ValueError:
                dist.distributed_c10d._get_default_group().abort()
        forever()

    return failure_of(work)


class FailureTest(unittest.TestCase):
    def failures(self, function, world, dead=None, **options):
        """Returns what the ranks returned, without the rank `dead`."""
        results = Ranks(world, function, **options).results(60)
        if dead is not None:
            self.assertEqual(results.pop(dead), ("died", -signal.SIGKILL))
        for kind, value in results:
            self.assertEqual(kind, "ok", value)
        return [value for _, value in results]

    def check_lost(self, function, victim=-1):
        for world in WORLDS:
            with self.subTest(world=world):
                for failure in self.failures(function, world, dead=victim % world):
                    self.assertEqual(failure["kind"], "lost", failure)
                    self.assertEqual(failure["ranks"], (victim % world,), failure)
                    self.assertIn("all_reduce", failure["operation"])
                    self.assertGreaterEqual(failure["position"], 20)
                    self.assertLess(failure["seconds"], 10)

    def test_a_killed_rank_is_named_in_wait(self):
        self.check_lost(killed_in_wait)

    def test_the_first_rank_killed_is_named(self):
        self.check_lost(first_killed, victim=0)

    def test_a_killed_rank_is_named_in_futures(self):
        self.check_lost(killed_with_futures)

    def test_a_killed_rank_is_named_in_backward(self):
        self.check_lost(killed_in_backward)

    def test_a_killed_rank_with_workers_is_named(self):
        self.check_lost(killed_with_workers)

    def test_a_disagreement_is_named(self):
        for world in WORLDS:
            for failure in self.failures(disagreement, world):
                self.assertEqual(failure["kind"], "disagreement", failure)
                self.assertIn("broadcast", failure["text"])
                suspect = "broadcast" if 0 in failure["ranks"] else "all_reduce"
                self.assertIn(suspect, failure["operation"])
                self.assertGreaterEqual(failure["position"], 0)
                self.assertNotIn("several threads", failure["text"])
        for failure in self.failures(disagreement_of_threads, 2):
            self.assertIn("several threads have called collectives of this group", failure["text"])

    def test_a_late_rank_is_named(self):
        # Torch has set_timeout() since 2.14.
        for function in (deadline, monitored) if VERSION >= (2, 14) else (monitored,):
            for world in WORLDS:
                for failure in self.failures(function, world):
                    self.assertEqual(failure["kind"], "deadline", failure)
                    self.assertEqual(failure["ranks"], (world - 1,), failure)

    def test_wait_has_a_timeout(self):
        run_ranks(2, wait_timeout)

    def test_a_rank_that_left_is_named(self):
        for world in WORLDS:
            for failure in self.failures(left, world, init=False)[:-1]:
                self.assertEqual(failure["kind"], "disagreement", failure)
                self.assertEqual(failure["ranks"], (world - 1,), failure)
                self.assertIn("barrier", failure["operation"])

    def test_a_wait_for_any_rank_names_a_killed_one(self):
        for world in WORLDS:
            for failure in self.failures(killed_while_others_wait_for_any, world, dead=world - 1):
                self.assertEqual((failure["kind"], failure["ranks"]), ("lost", (world - 1,)), failure)
                self.assertIn("recv (user) float32[1] from any rank", failure["operation"])
                self.assertLess(failure["seconds"], 10)

    def test_a_wait_for_any_rank_ends_when_all_others_have_left(self):
        for world in WORLDS:
            failure = self.failures(others_left, world, init=False)[0]
            self.assertEqual(failure["kind"], "disagreement", failure)
            self.assertRegex(failure["text"], "from any rank.* (has|have) left: it cannot go on")
            self.assertLess(failure["seconds"], 10)

    def test_a_rank_that_exits_with_an_error_is_named(self):
        for world in WORLDS:
            results = Ranks(world, exits, init=False).results(60)
            for outcome, failure in results[:-1]:
                self.assertEqual(outcome, "ok", failure)
                self.assertEqual((failure["kind"], failure["ranks"]), ("failed", (world - 1,)), failure)
                self.assertRegex(failure["text"], r"SystemExit.*failure_test.py:\d+")

    def test_spawn_reports_the_rank_that_has_caused_the_failure(self):
        for guilty in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                with self.assertRaisesRegex(ProcessRaisedException, "ValueError: no such file") as caught:
                    start_processes(spawned, (guilty, f"{folder}/store"), 2, start_method="fork")
                self.assertEqual(caught.exception.error_index, guilty)

    def test_abort_names_the_rank(self):
        for world in WORLDS:
            for failure in self.failures(aborts, world):
                self.assertEqual((failure["kind"], failure["ranks"]), ("failed", (0,)), failure)
                self.assertRegex(failure["text"], r"ValueError: no such file \(.*failure_test.py:\d+\)")


if __name__ == "__main__":
    unittest.main()
