"""BalancedSampler: global batches that the ranks divide by their measured speed.

    job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
    sampler = evenkeel_c10d.BalancedSampler(data, job, batch_size=256, ahead=4)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2)   # ahead: workers x prefetch
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in job.input(loader):
            optimizer.zero_grad()
            loss = cross_entropy(ddp(images), labels)     # a mean over this rank's samples
            (loss * job.weight()).backward()
            optimizer.step()

A global batch is fixed for the run, whatever the number of ranks. `job.weight()` makes the gradient
that DistributedDataParallel averages that of the mean over the global batch: the result is that of
one process on the same batches, whoever computes a sample. Batch norm is an exception: its
statistics are over a rank's own samples (SyncBatchNorm's are over all of them).

Shares of a batch are decided from the ranks' times up to the step `lag` before its own, on all ranks
the same, so that a loader can ask for it in advance. If the times are not here yet, it waits. The
times travel as those of `watch` do, with a message of each rank after each step.
"""

import datetime
import zlib

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class _Batch:
    """A batch that the loader has asked for, and that is not trained yet."""

    def __init__(self, index, step, first, boundaries, rank):
        self.index = index
        self.step = step  # The number of the reduction that trains it.
        self.first = first
        self.boundaries = boundaries
        self.count = boundaries[rank + 1] - boundaries[rank]
        self.samples = boundaries[-1]
        # Its square, summed over 2^14 ranks, is below 2^63.
        self.hash = zlib.crc32(repr((index, step, first, boundaries)).encode()) & 0xFFFFFF

    def __str__(self):
        counts = [b - a for a, b in zip(self.boundaries, self.boundaries[1:])]
        return f"{counts} from sample {self.first} on, in batch {self.index} of step {self.step}"


def _length_of(data):
    return data if isinstance(data, int) else len(data)


class BalancedSampler(Sampler):
    """A batch sampler: yields the indices of this rank's samples of each global batch.

    All ranks of the job make it together, with equal arguments (`least` and `most` may differ).

    Args:
        data: a dataset with a length, or the number of its samples.
        job: what `evenkeel_c10d.watch` has returned.
        batch_size: the samples of a global batch, of all ranks together.
        shuffle, seed: an epoch's order is that of `seed` plus the epoch; without it 0, 1, 2, ...
        drop_last: whether the short batch at the end of an epoch is left out. Otherwise it is
            divided in proportion, and a rank that gets no sample repeats one with the weight 0.
        ahead: how many batches the loader asks for in advance: num_workers x prefetch_factor.
        accumulate: the batches of each optimizer's step; all but the last one are in no_sync().
        quantum, least, most: shares are the even one and multiples of the quantum, from this rank's
            least to its most; at most 16 sizes. 0: an eighth of the even share, one quantum, and
            twice the even share.
    """

    def __init__(
        self,
        data,
        job,
        batch_size,
        *,
        shuffle=True,
        seed=0,
        drop_last=False,
        ahead=0,
        accumulate=1,
        quantum=0,
        least=0,
        most=0,
    ):
        self._length = _length_of(data)
        self._job = job
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._accumulate = accumulate
        self._epoch = 0
        self._resume_at = 0  # The batch of the epoch with which the next pass begins.
        self._next_batch = 0  # That behind the last one that was weighed.
        self._pending = []  # Batches that were asked for, and not weighed yet.
        self._weighed = []  # Those of the current step.
        self._check = None  # The comparison of the last one that was weighed, in flight.
        shared = {
            "samples": self._length,
            "batch_size": batch_size,
            "shuffle": bool(shuffle),
            "seed": seed,
            "drop_last": bool(drop_last),
            "ahead": ahead,
            "accumulate": accumulate,
            "quantum": quantum,
            "steps before it": job._monitor.steps,
        }
        limits = {"least": least, "most": most}
        self._begin(shared, limits)

    def _begin(self, shared, limits):
        """Compares the arguments of all ranks, and begins to divide by them."""
        job = self._job
        error = _error_in(shared, limits, job.world_size)
        everything = [None] * job.world_size
        dist.all_gather_object(everything, (error, shared, limits), group=job._group)
        errors = [f"rank {r}: {error}" for r, (error, _s, _l) in enumerate(everything) if error]
        for name in shared:
            values = [shared[name] for _error, shared, _limits in everything]
            if values.count(values[0]) != len(values):
                errors.append(f"ranks differ in {name}: {values} by rank")
        if errors:
            raise ValueError("evenkeel: BalancedSampler: " + "; ".join(errors))
        lag = -(-shared["ahead"] // shared["accumulate"]) + 2
        limits = [limits for _error, _shared, limits in everything]
        job._share(
            self,
            batch=shared["batch_size"],
            quantum=shared["quantum"],
            least=[one["least"] for one in limits],
            most=[one["most"] for one in limits],
            lag=lag,
        )

    @property
    def shares(self):
        """The samples of each rank in the batch that was divided last, were it a whole one."""
        return self._job._monitor.shares()

    def __len__(self):
        """The number of batches of an epoch, equal on all ranks."""
        whole, rest = divmod(self._length, self._batch_size)
        return whole + (1 if rest > 0 and not self._drop_last else 0)

    def __iter__(self):
        job = self._job
        if job._sampler is not self:
            raise RuntimeError(
                "evenkeel: the job has been closed, or has another BalancedSampler by now."
            )
        order = range(self._length)
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._length, generator=generator).tolist()
        self._pending.clear()
        job._monitor.restart_sharing()
        first_step = job._monitor.steps + 1
        begin, self._resume_at = self._resume_at, 0
        self._next_batch = begin
        for index in range(begin, len(self)):
            step = first_step + (index - begin) // self._accumulate
            first = index * self._batch_size
            samples = min(self._batch_size, self._length - first)
            batch = _Batch(index, step, first, job._divide(step, samples), job.rank)
            self._pending.append(batch)
            own = batch.boundaries[job.rank] + first
            yield [order[i] for i in range(own, own + batch.count)] or [order[first]]

    def set_epoch(self, epoch):
        """Sets the epoch of the next pass over the data."""
        if epoch != self._epoch:
            self._resume_at = self._next_batch = 0
        self._epoch = epoch

    def state_dict(self):
        """Returns the epoch, and how many of its batches were weighed.

        Equal on all ranks, and of use in a group of another size: batches are global.
        """
        return {"epoch": self._epoch, "batch": self._next_batch}

    def load_state_dict(self, state):
        """The next pass goes on behind the batches that were weighed."""
        self._epoch = state["epoch"]
        self._resume_at = self._next_batch = state["batch"]

    # ---- For the job ----

    def _weight(self, n):
        job = self._job
        if not self._pending:
            raise RuntimeError(
                "evenkeel: weight() is called once for each batch of the BalancedSampler, and no "
                "batch is left."
            )
        batch = self._pending.pop(0)
        if n is not None and (n < 0 or int(n) != n):
            raise ValueError(f"evenkeel: weight({n}): the number of units must be an integer from 0.")
        units = batch.count if n is None else int(n) if batch.count > 0 else 0
        self._end_check()
        message = torch.tensor([units, batch.hash, batch.hash**2])
        work = dist.all_reduce(message, group=job._group, async_op=True)
        self._check = (work, message, batch)
        self._weighed.append(batch)
        self._next_batch = batch.index + 1
        total = batch.samples
        if n is not None:
            total = self._end_check()
        return units * job.world_size / total if total > 0 else 0.0

    def _end_check(self):
        """Waits for the last comparison, and returns the sum of all ranks' units.

        The ranks' numbers are equal if and only if the sum of their squares times the number of
        ranks is the square of their sum, so all ranks see a difference.
        """
        if self._check is None:
            return None
        (work, message, batch), self._check = self._check, None
        work.wait()
        total, sum_of_hashes, sum_of_squares = message.tolist()
        if sum_of_squares * self._job.world_size == sum_of_hashes**2:
            return total
        everything = [None] * self._job.world_size
        dist.all_gather_object(everything, str(batch), group=self._job._group)
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(everything)]
        raise RuntimeError("evenkeel: ranks differ in their shares: " + "; ".join(texts))

    def _before_reduction(self, step):
        """The backward pass of reduction number `step` has ended. Raises if a batch has no weight."""
        weighed, self._weighed = self._weighed, []
        begun = sum(batch.step == step for batch in self._pending)
        if len(weighed) == 0 or begun > 0 or any(batch.step != step for batch in weighed):
            raise RuntimeError(
                f"evenkeel: step {step} has weighed the batches {[b.index for b in weighed]}, and "
                f"{begun} of its batches are left: multiply the loss of each batch by job.weight(), "
                f"and reduce gradients after {self._accumulate} batches (accumulate), and at the end "
                "of an epoch."
            )
        self._end_check()


def _error_in(shared, limits, world_size):
    for name, least in (
        ("samples", 1),
        ("batch_size", world_size),
        ("ahead", 0),
        ("accumulate", 1),
        ("quantum", 0),
    ):
        if int(shared[name]) != shared[name] or shared[name] < least:
            return f"{name} is {shared[name]}, and must be an integer from {least} on"
    for name, value in limits.items():
        if int(value) != value or value < 0:
            return f"{name} is {value}, and must be an integer from 0 on"
    return ""


def timeout_of(group):
    """Returns how long a collective of the group may take."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return datetime.timedelta(minutes=30)
