"""watch: the ranks that make others wait, or are missing, are named on any backend."""

import copy
import dataclasses
import gc
import logging
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import time
import unittest
import weakref

from groups import VERSION, Ranks, run_ranks  # Before torch: it unsets EVENKEEL_REPLACE_GLOO.
import torch
import torch.distributed as dist
from life_test import torchrun
from torch import nn
from torch.distributed.algorithms import join as torch_join
from torch.nn.parallel import DistributedDataParallel

import evenkeel_c10d

STEPS = 560
DELAY = 0.02


class Collected(logging.Handler):
    """The warnings of this rank."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("evenkeel_c10d").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())

    def wait_for(self, text, seconds=20):
        """Waits for a line with this text, and returns it; fails if there is none in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if text in line:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"no line has {text!r}: {self.lines}")


def make_model(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    # That of torch 2.11 sends buffers by an operation that invalidates an earlier forward pass.
    ddp = DistributedDataParallel(net, broadcast_buffers=VERSION >= (2, 12), **options)
    return ddp, torch.optim.SGD(ddp.parameters(), 0.01, momentum=0.9)


def delayed(phase, slow):
    """A rank function whose rank `slow` sleeps in `phase` of each step. Returns what was found."""

    def run(rank, world):
        said = Collected()
        ddp, optimizer = make_model()
        job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
        is_slow = rank == slow

        def sleep_in(where):
            if is_slow and phase == where:
                time.sleep(DELAY)

        def load():
            for _ in range(STEPS):
                sleep_in("input")
                yield torch.randn(16, 8)

        for batch in job.input(load()):
            optimizer.zero_grad()
            outputs = ddp(batch)
            sleep_in("forward")
            outputs.register_hook(lambda gradient: sleep_in("backward"))
            outputs.pow(2).mean().backward()
            optimizer.step()
            sleep_in("outside")
            with job.phase("saving"):
                sleep_in("saving")
            # Programs often reduce their loss; who waits in it is not busy.
            dist.all_reduce(outputs.detach().mean())
        if rank == 0:
            said.wait_for(f"rank {slow} cost the group")
        deadline = time.monotonic() + 10
        while not job.stragglers() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [(who, where) for who, _cost, where in job.stragglers()]
        dist.barrier()
        job.close()
        return found, job.table().count("\n")

    return run


def train(watched):
    """A rank function that trains in all ways of one step, and returns weights and steps counted."""

    def run(rank, world):
        ddp, optimizer = make_model(find_unused_parameters=True)
        job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer) if watched else None
        torch.manual_seed(rank)
        for step in range(12):
            batch = torch.randn(16, 8)
            optimizer.zero_grad()
            if step % 3 == 0:  # Accumulation.
                with ddp.no_sync():
                    ddp(batch).sum().backward()
            if step % 4 == 1:  # A pass without gradients, as in evaluation.
                with torch.no_grad():
                    ddp(batch)
            outputs = ddp(batch)
            if step % 4 == 2:  # One backward pass for two forward passes.
                outputs = outputs + ddp(batch * 2)
            loss = outputs.pow(2).mean()
            if step % 4 == 3:  # A penalty: autograd.grad() reaches no parameter.
                batch.requires_grad_()
                outputs = ddp(batch)
                (gradient,) = torch.autograd.grad(outputs.sum(), batch, create_graph=True)
                loss = outputs.pow(2).mean() + gradient.pow(2).mean()
            loss.backward()
            optimizer.step()
        steps = 12
        if job:
            steps = job._monitor.steps
            assert job._waits == 0
            # Copies have no hooks.
            for other in (copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))):
                other(torch.randn(4, 8)).sum().backward()
            assert copy.deepcopy(ddp).module[0].weight.equal(ddp.module[0].weight)
            assert job._monitor.steps == steps
            job.close()
        return [p.detach().clone() for p in ddp.module.parameters()], steps

    return run


def begin(**options):
    """Returns the warnings to come, a model with its optimizer, and the watch, after one step."""
    said = Collected()
    ddp, optimizer = make_model()
    job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer, **options)
    ddp(torch.randn(4, 8)).sum().backward()
    return said, ddp, optimizer, job


def hangs(rank, world):
    """Rank 1 does not come to step 5 until the others have said so."""
    said, ddp, optimizer, job = begin(hang_after=1.0)

    def reads_forever():
        while not said.lines:
            time.sleep(0.05)
        time.sleep(4)

    for _ in range(2):  # Two forward passes in a step leave no wait behind.
        (ddp(torch.randn(4, 8)) + ddp(torch.randn(4, 8))).sum().backward()
    for step in range(3, 8):
        if rank == 1 and step == 5:
            reads_forever()
        if rank == 2 and step == 5:  # It waits, too, and later than rank 0.
            time.sleep(0.45)
        ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    job.close()
    return said.lines


def is_slow_and_does_not_hang(rank, world):
    """Ranks take longer than `hang_after` without a step, and no wait takes as long."""
    said, ddp, _, job = begin(hang_after=1.0)
    time.sleep(2)
    for _ in range(10):  # An evaluation.
        time.sleep(0.4 if rank == 1 else 0)
        dist.all_reduce(torch.ones(1))
    with torch_join.Join([ddp]):  # Rank 0 has no more input.
        for _ in range(10 if rank == 1 else 1):
            time.sleep(0.4)
            ddp(torch.randn(4, 8)).sum().backward()
    job.close()
    return said.lines


def closes_early(rank, world):
    said, ddp, _, job = begin(hang_after=1.0)
    if rank == 1:
        job.close()
        time.sleep(5)
    ddp(torch.randn(4, 8)).sum().backward()
    job.close()
    return said.lines


@dataclasses.dataclass
class Outputs:
    logits: torch.Tensor


class Hiding(nn.Linear):
    """torch does not look into what it returns."""

    hide = Outputs

    def forward(self, inputs):
        return self.hide(super().forward(inputs))


def hides(rank, world):
    said = Collected()
    ddp = DistributedDataParallel(Hiding(8, 4), static_graph=True)
    job = evenkeel_c10d.watch(model=ddp)
    for _ in range(3):
        ddp(torch.randn(4, 8)).logits.sum().backward()
    assert (job._monitor.steps, said.lines) == (3, [])
    ddp.module.hide = lambda tensor: lambda: tensor
    for _ in range(2):
        ddp(torch.randn(4, 8))().sum().backward()
    job.close()
    return said.lines


def loses_rank_1(rank, world):
    said, *_ = begin()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return said.wait_for("rank 1")


ENDS_WITH_AN_EXCEPTION = """
import time, torch, evenkeel_c10d
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
evenkeel_c10d.watch(model=ddp)
if dist.get_rank() == 1:
    raise ValueError("no such shard")
time.sleep(20)
"""


def closes(rank, world):
    ddp, optimizer = make_model()
    wait = dist.Work.wait
    hooks = [len(ddp._forward_hooks), len(ddp._forward_pre_hooks)]
    for _ in range(2):
        first = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
        second = evenkeel_c10d.watch(model=ddp)
        ddp(torch.randn(4, 8)).sum().backward()
        first.close()
        ddp(torch.randn(4, 8)).sum().backward()
        assert (first._monitor.steps, second._monitor.steps) == (1, 2)
        second.close()
        second.close()
    third = evenkeel_c10d.watch(model=ddp)
    outputs = ddp(torch.randn(4, 8))
    outputs.register_hook(lambda gradient: third.close())  # In the middle of a backward pass.
    outputs.sum().backward()
    assert dist.Work.wait is wait
    gone = weakref.ref(first)
    del first, second
    gc.collect()
    assert gone() is None
    assert hooks == [len(ddp._forward_hooks), len(ddp._forward_pre_hooks)]
    assert "_sync_buffers" not in ddp.__dict__
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    ddp(torch.randn(4, 8)).sum().backward()
    return True


def refuses(rank, world):
    ddp, _ = make_model()
    texts = []
    for arguments in (
        {"model": nn.Linear(2, 2)},
        {"model": ddp, "hang_after": 0},
        {"model": ddp, "optimizer": "sgd"},
    ):
        try:
            evenkeel_c10d.watch(**arguments)
        except (TypeError, ValueError) as error:
            texts.append(str(error))
    job = evenkeel_c10d.watch(model=ddp)
    try:
        with job.phase("reading"):
            pass
    except ValueError as error:
        texts.append(str(error))
    job.close()
    return texts


def hangs_until(event):
    """A rank function whose rank 1 loads its input, after a step, until the event is set."""

    def run(rank, world):
        _said, ddp, _optimizer, job = begin()
        if rank == 1:
            with job.phase("input"):
                event.wait(60)
        ddp(torch.randn(4, 8)).sum().backward()
        job.close()

    return run


class WatchTest(unittest.TestCase):
    def test_names_the_rank_and_the_phase(self):
        for world, backend, slow, phase in (
            (2, "gloo", 0, "outside"),
            (3, "evenkeel", 2, "backward"),
        ):
            with self.subTest(world=world, backend=backend, slow=slow, phase=phase):
                for found, lines in run_ranks(world, delayed(phase, slow), backend=backend):
                    self.assertEqual(found, [(slow, phase)])
                    self.assertEqual(lines, world + 1)

    def test_changes_no_number(self):
        for backend in ("gloo", "evenkeel"):
            plain = run_ranks(2, train(False), backend=backend)
            watched = run_ranks(2, train(True), backend=backend)
            for (expected, steps), (weights, watched_steps) in zip(plain, watched):
                self.assertEqual(steps, watched_steps)
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(expected, weights)))

    def test_says_who_is_missing_in_a_hang(self):
        lines = run_ranks(3, hangs, backend="gloo")
        self.assertEqual([len(of_rank) for of_rank in lines], [1, 1, 0], lines)
        (summary,) = lines[0]
        self.assertRegex(summary, r"has not ended for \d+ s: rank 1 is in reads_forever \(watch_test.py:\d+\)")
        # Rank 0, which reports it, waits too, and its own record may have arrived before.
        self.assertRegex(summary, r"ranks? (0,)?2 waits in (backward|forward) \(watch_test.py:\d+\)")
        (stack,) = lines[1]
        self.assertIn("rank 1: other ranks wait for this one", stack)
        self.assertIn("reads_forever()", stack)

    @unittest.skipUnless("EVENKEEL_TOP" in os.environ, "EVENKEEL_TOP is not the path of tools:top")
    def test_top_shows_the_rank_that_the_others_wait_for(self):
        event = multiprocessing.get_context("fork").Event()
        ranks = Ranks(3, hangs_until(event), backend="gloo")
        command = [os.environ["EVENKEEL_TOP"], "--once", str(ranks.processes[0].pid)]
        text = ""
        deadline = time.monotonic() + 40
        named = "for rank 1, which runs (input)"
        while named not in text and time.monotonic() < deadline:
            text = subprocess.run(command, capture_output=True, text=True).stdout
            time.sleep(0.2)
        event.set()
        self.assertEqual([kind for kind, _ in ranks.results()], ["ok"] * 3)
        self.assertRegex(text, r"ranks 0,2 have waited for [\d.]+ s " + re.escape(named))
        self.assertIn("3 ranks, step 1", text)

    def test_slow_ranks_do_not_hang(self):
        self.assertEqual(run_ranks(2, is_slow_and_does_not_hang, backend="gloo"), [[], []])

    def test_a_rank_that_has_closed_is_not_called_silent(self):
        lines = run_ranks(2, closes_early, backend="gloo")
        self.assertRegex(lines[0][0], "rank 1 has closed its watch, after 1 steps; rank 0 waits in ")
        self.assertEqual(lines[1], [])

    def test_outputs_that_hide_their_tensors(self):
        for (line,) in run_ranks(2, hides, backend="gloo"):
            self.assertIn("no tensor is found in the outputs of the module (function)", line)

    def test_names_a_rank_that_was_killed(self):
        results = Ranks(3, loses_rank_1, backend="gloo").results()
        self.assertEqual(results[1][0], "died")
        for rank in (0, 2):
            self.assertEqual(results[rank][0], "ok", results[rank])
            self.assertRegex(results[rank][1], "rank 1 .*(lost|connection)")

    def test_tells_the_others_why_a_program_ended(self):
        status, output = torchrun(2, backend="gloo", end=ENDS_WITH_AN_EXCEPTION)
        self.assertNotEqual(status, 0)
        self.assertRegex(output, "rank 0: rank 1 .*the program ended with ValueError: no such shard")

    def test_leaves_nothing_behind(self):
        self.assertEqual(run_ranks(2, closes, backend="gloo"), [True, True])

    def test_one_rank(self):
        self.assertEqual(run_ranks(1, closes, backend="gloo"), [True])

    def test_refuses_what_it_cannot_watch(self):
        for texts in run_ranks(2, refuses, backend="gloo"):
            self.assertIn("needs a DistributedDataParallel and got Linear", texts[0])
            self.assertIn("hang_after is 0 seconds", texts[1])
            self.assertIn("needs a torch.optim.Optimizer and got str", texts[2])
            self.assertIn("no phase 'reading', only outside, input", texts[3])


if __name__ == "__main__":
    unittest.main()
