"""BalancedSampler: global batches that the ranks divide by their measured speed.

    job = evenkeel_c10d.watch(model=ddp, optimizer=optimizer)
    sampler = evenkeel_c10d.BalancedSampler(data, job, batch_size=256, ahead=4)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2)   # ahead: workers x prefetch
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for images, labels in job.input(loader):
            optimizer.zero_grad()
            loss = cross_entropy(ddp(images), labels)     # a mean over this rank's samples
            (loss * job.weight()).backward()
            optimizer.step()

A global batch is fixed for the run, whatever the number of ranks. `job.weight()` makes the gradient
that DistributedDataParallel averages that of the mean over the global batch: the result is that of
one process on the same batches, whichever rank computes a sample. Batch norm is an exception: its
statistics are over a rank's own samples, a repeated one included (`drop_last`).

Shares of a batch are decided equally on all ranks, from the ranks' times up to an earlier step, so
that a loader can ask for batches in advance (join/steps/lagged_shares.h). The all-reduce in which
`weight()` compares the ranks carries these times, 88 bytes for each rank.
"""

import collections
import numbers
import zlib

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

_TIMES = 7  # Numbers of StepMonitor.last_times().


class _Batch:
    """A batch that the loader has asked for."""

    def __init__(self, epoch, index, step, is_first, first, boundaries, rank):
        self.epoch = epoch
        self.index = index
        self.step = step  # The number of the reduction that trains it.
        self.is_first = is_first  # In its step.
        self.first = first
        self.boundaries = boundaries
        self.count = boundaries[rank + 1] - boundaries[rank]
        self.samples = boundaries[-1]

    def place(self, has_units):
        """Returns numbers that are equal on all ranks."""
        rest = zlib.crc32(repr((self.first, self.boundaries, has_units)).encode())
        return [self.epoch, self.index, self.step, rest]


class BalancedSampler(Sampler):
    """A batch sampler: yields the indices of this rank's samples of each global batch.

    All ranks of the job make it together, with equal arguments (`least` and `most` may differ).

    Args:
        data: a dataset with a length, or the number of its samples.
        job: the result of `evenkeel_c10d.watch`.
        batch_size: the samples of a global batch, of all ranks together.
        shuffle, seed: whether an epoch is shuffled, with `seed` plus the epoch as the generator's
            seed; otherwise its order is 0, 1, 2, ...
        drop_last: whether the short batch at the end of an epoch is left out. Otherwise it is
            divided in proportion, and a rank that gets no sample repeats one with the weight 0.
        ahead: how many batches the loader asks for in advance: num_workers x prefetch_factor, and
            those that the loop itself fetches before it trains them. The loader must yield them in
            order (in_order=True, the default): weights are given in the order of asking.
        accumulate: the batches of each optimizer's step; all but the last one are in no_sync().
        quantum, least, most: this rank's share is the even one plus or minus multiples of the
            quantum, from `least` to `most`, at most 16 sizes. Where they are 0: an eighth of the
            even share; one quantum and twice the even share, or less far from the even share if
            these would be more than 16 sizes.

    Raises:
        ValueError: on all ranks, if arguments are out of range or differ between the ranks.

    `len()` is the number of batches of the next pass, or of the one that runs.
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
        if not hasattr(job, "_monitor"):
            raise TypeError("evenkeel: BalancedSampler: job must be a result of evenkeel_c10d.watch().")
        self._job = job
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._ahead = ahead
        self._accumulate = accumulate
        self._epoch = 0
        self._begin = 0  # The batch with which the next pass, or the one that runs, begins.
        self._is_resumed = False  # By load_state_dict(); else the next pass begins with batch 0.
        self._trained = 0  # Batches of the epoch.
        self._passes = 0
        self._pending = []  # Batches that were asked for, and have no weight yet.
        self._given = []  # Batches of the current step that have one.
        self._check = None  # The comparison for the last of these, in flight.
        self._timed = 0  # The last step whose times of all ranks were added.
        self._length, error = _length_of(data)
        self._agree(
            error,
            {
                "samples": self._length,
                "batch_size": batch_size,
                "shuffle": bool(shuffle),
                "seed": seed,
                "drop_last": bool(drop_last),
                "ahead": ahead,
                "accumulate": accumulate,
                "quantum": quantum,
                "steps before it": job._monitor.steps,
            },
            {"least": least, "most": most},
        )

    def _agree(self, error, shared, limits):
        """Compares the arguments of all ranks, and begins to divide by them."""
        job = self._job
        error = error or _error_in(shared, limits, job.world_size)
        everything = [None] * job.world_size
        dist.all_gather_object(everything, (error, shared, limits), group=job._group)
        errors = [f"rank {r}: {error}" for r, (error, _s, _l) in enumerate(everything) if error]
        for name in shared:
            values = [shared[name] for _error, shared, _limits in everything]
            if values.count(values[0]) != len(values):
                errors.append(f"ranks differ in {name}: {values} by rank")
        if errors:
            raise ValueError("evenkeel: BalancedSampler: " + "; ".join(errors))
        limits = [limits for _error, _shared, limits in everything]
        # A batch is asked for when the batch `ahead + 1` before it has a weight; the first weight of
        # a step brings the times of the step before.
        self._lag = -(-(self._ahead + 1) // self._accumulate) + 1
        try:
            job._share(
                self,
                batch=self._batch_size,
                quantum=shared["quantum"],
                least=[one["least"] for one in limits],
                most=[one["most"] for one in limits],
                lag=self._lag,
            )
        except RuntimeError as error:  # On all ranks: the values are equal.
            raise ValueError(str(error)) from None

    @property
    def shares(self):
        """The shares of a whole batch, by rank, that the last divided batch used."""
        return self._job._monitor.shares()

    @property
    def epoch(self):
        """The epoch of the next pass, or of the one that runs: that of set_epoch() or of the state."""
        return self._epoch

    def _batches(self):
        whole, rest = divmod(self._length, self._batch_size)
        return whole + (1 if rest > 0 and not self._drop_last else 0)

    def __len__(self):
        return self._batches() - self._begin

    def __iter__(self):
        job = self._job
        if job._sampler is not self:
            raise RuntimeError(
                "evenkeel: the job was closed, or has another BalancedSampler by now."
            )
        if self._given:
            indices = [batch.index for batch in self._given]
            self._given = []
            raise RuntimeError(
                f"evenkeel: batches {indices} were accumulated and not reduced: reduce gradients "
                "after the last batch of each pass, too."
            )
        if not self._is_resumed:  # By passes that train nothing, too.
            self._begin = 0
        self._trained = self._begin
        self._passes += 1
        this_pass = self._passes
        self._pending.clear()
        job._monitor.restart_sharing()
        order = range(self._length)
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._length, generator=generator)
        epoch, begin, first_step = self._epoch, self._begin, job._monitor.steps + 1
        for index in range(begin, self._batches()):
            if this_pass != self._passes:
                raise RuntimeError("evenkeel: another pass over the BalancedSampler has begun.")
            step = first_step + (index - begin) // self._accumulate
            is_first = (index - begin) % self._accumulate == 0
            first = index * self._batch_size
            samples = min(self._batch_size, self._length - first)
            if max(step - self._lag, first_step - 2) > self._timed:
                self._end_check()
            try:
                boundaries = job._divide(step, samples)
            except RuntimeError as error:
                raise RuntimeError(
                    f"evenkeel: a batch before batch {index} was loaded and not trained: each one needs "
                    "job.weight() and a reduction. To skip one multiply its loss by 0; evaluation "
                    f"needs a loader of its own ({error})"
                ) from None
            self._pending.append(_Batch(epoch, index, step, is_first, first, boundaries, job.rank))
            if len(self._pending) > self._ahead + 1:
                raise RuntimeError(
                    f"evenkeel: batch {self._pending[0].index} has no weight: call job.weight() once "
                    f"for each batch; or the loader asks for more than {self._ahead} batches in "
                    "advance: pass ahead=num_workers * prefetch_factor, plus the batches that the "
                    "loop fetches before it trains them; or the sampler is not its batch_sampler."
                )
            begins, ends = boundaries[job.rank : job.rank + 2]
            own = order[first + begins : first + ends] if begins < ends else order[first : first + 1]
            yield own.tolist() if self._shuffle else list(own)
        self._is_resumed = False

    def set_epoch(self, epoch):
        """Sets the epoch of the next pass over the data."""
        if epoch != self._epoch:
            self._begin = self._trained = 0
            self._is_resumed = False
        self._epoch = epoch

    def state_dict(self):
        """Returns the epoch, and how many of its batches were reduced; after all, the next epoch.

        Equal on all ranks, and valid in a group of another size: batches are global.
        """
        epoch, batch = self._place(self._epoch, self._trained)
        return {"epoch": epoch, "batch": batch, **self._identity()}

    def _place(self, epoch, batch):
        return (epoch, batch) if batch < self._batches() else (epoch + 1, 0)

    def load_state_dict(self, state):
        """Makes the next pass begin after the batches that were reduced. On all ranks, before it.

        Passes that train nothing, such as a look at the first batch, leave it where it is. Raises
        ValueError if the state is of other data, or of another batch size, order or seed.
        """
        missing = {"epoch", "batch", *self._identity()} - set(state)
        if missing:
            raise ValueError(f"evenkeel: the state of a BalancedSampler has no {sorted(missing)}.")
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(f"evenkeel: the state has {name} {state[name]}, this one {value}.")
        self._epoch, self._begin = self._place(state["epoch"], state["batch"])
        self._trained = self._begin
        self._is_resumed = True

    def _identity(self):
        return {
            "samples": self._length,
            "batch_size": self._batch_size,
            "shuffle": bool(self._shuffle),
            "seed": self._seed,
        }

    # ---- For the job ----

    def _weight(self, n):
        job = self._job
        if n is not None and (n < 0 or int(n) != n):
            raise ValueError(f"evenkeel: weight({n}): the number of units must be an integer from 0.")
        if not self._pending:
            raise RuntimeError(
                "evenkeel: weight() is called once for each batch of the BalancedSampler, and no "
                "batch is left."
            )
        if len(self._given) >= self._accumulate:
            indices = [batch.index for batch in self._given]
            raise RuntimeError(
                f"evenkeel: batches {indices} have a weight, and no reduction of the watched model was "
                f"seen: reduce gradients after accumulate={self._accumulate} batches, and call weight() "
                "once for each."
            )
        self._end_check()
        batch = self._pending.pop(0)
        units = batch.count if n is None else int(n) if batch.count > 0 else 0
        is_timed = batch.is_first and job._monitor.steps == batch.step - 1
        times = (job._monitor.last_times() if is_timed else None) or [-1] * _TIMES
        own = torch.tensor(batch.place(n is not None) + times)
        message = torch.zeros(1 + job.world_size * len(own), dtype=torch.int64)
        message[0] = units
        message[1:].view(job.world_size, -1)[job.rank] = own
        work = dist.all_reduce(message, group=job._group, async_op=True)
        self._check = (work, message, batch)
        self._given.append(batch)
        total = batch.samples if n is None else self._end_check()
        return units * job.world_size / total if total > 0 else 0.0

    def _end_check(self):
        """Waits for the last comparison, adds its times, and returns the sum of all ranks' units."""
        if self._check is None:
            return None
        (work, message, batch), self._check = self._check, None
        work.wait()
        ranks = message[1:].view(self._job.world_size, -1).tolist()
        places = [tuple(rank[:-_TIMES]) for rank in ranks]
        if places.count(places[0]) != len(places):
            raise RuntimeError(_difference(places, batch, self._job.rank))
        times = [time for rank in ranks for time in rank[-_TIMES:]]
        if min(times) >= 0 and batch.step - 1 > self._timed:
            self._job._monitor.add_times(batch.step - 1, times)
            self._timed = batch.step - 1
        return int(message[0])

    def _before_reduction(self, step):
        """A backward pass that reduces has ended. Raises if its batches are not those of `step`."""
        given, self._given = self._given, []
        is_last = len(given) > 0 and given[-1].index + 1 == self._batches()
        is_whole = len(given) == self._accumulate or (is_last and len(given) < self._accumulate)
        if not given:
            raise RuntimeError(
                f"evenkeel: no batch of step {step} has a weight: multiply the loss of each batch by "
                "job.weight() before its backward pass; all such passes but the last one of a step are "
                "in no_sync()."
            )
        if not is_whole or any(batch.step != step for batch in given):
            raise RuntimeError(
                f"evenkeel: step {step} has the batches {[one.index for one in given]}: multiply the "
                "loss of each batch by job.weight(), and reduce gradients after "
                f"accumulate={self._accumulate} batches, or after the last one of an epoch."
            )
        self._end_check()
        self._trained = given[-1].index + 1
        self._is_resumed = False


def _length_of(data):
    """Returns the number of samples, and an error."""
    try:
        return (data if isinstance(data, numbers.Integral) else len(data)), ""
    except Exception as error:  # Other ranks wait for this one.
        return 0, f"the data have no length: {error}"


def _difference(places, batch, rank):
    """Returns the error of ranks whose places differ: those of each, and this rank's shares."""
    ranks = collections.defaultdict(list)
    for one, place in enumerate(places):
        ranks[place].append(one)
    have = [
        f"{'rank' if len(those) == 1 else 'ranks'} {','.join(map(str, those))}: batch {index} of "
        f"epoch {epoch} in step {step}"
        for (epoch, index, step, _rest), those in ranks.items()
    ]
    counts = [b - a for a, b in zip(batch.boundaries, batch.boundaries[1:])]
    return (
        "evenkeel: ranks differ in the batch or its epoch, in their shares, or only some of them pass "
        f"a number to weight(): {'; '.join(have)}. Rank {rank} has shares {counts} from sample "
        f"{batch.first} on."
    )


def _error_in(shared, limits, world_size):
    bounds = {"samples": 1, "batch_size": world_size, "ahead": 0, "accumulate": 1, "quantum": 0}
    for name, value in {**shared, **limits}.items():
        least = bounds.get(name, 0)
        if not isinstance(value, numbers.Integral) or value < least:
            return f"{name} is {value!r}, and must be an integer from {least} on"
    return ""
