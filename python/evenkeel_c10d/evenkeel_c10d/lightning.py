"""Uneven inputs in Lightning: a Join context around each training epoch.

    from evenkeel_c10d.lightning import JoinCallback
    trainer = Trainer(strategy="ddp", use_distributed_sampler=False, callbacks=[JoinCallback()])

The weights are those of `evenkeel_c10d.Join`. With `accumulate_grad_batches` a rank whose inputs
end within a group of batches adds what it has to the others' gradients; the last group of the
longest rank may be incomplete, as in Lightning. `self.log(..., sync_dist=True)` reduces over the
ranks that have input, and all ranks end an epoch with one count of steps and batches. Validation
runs when all ranks have trained the epoch.

Limits:  Each rank needs at least one batch. Optimization must be automatic, and without
         ZeroRedundancyOptimizer (Lightning steps with a closure). Save at the end of an epoch:
         within one, rank 0 may have no more input. Rank 0, which writes the logs, logs no metrics
         of the steps after its own last batch; those of the epoch are complete. A SIGTERM ends the
         rank that receives it; the other ranks then raise evenkeel_c10d.Error, which names it.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .join import Join

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

__all__ = ["JoinCallback"]


class JoinCallback(Callback):
    """Trains each epoch of Trainer.fit() in a Join context; the module describes it."""

    def setup(self, trainer, pl_module, stage):
        loop = trainer.fit_loop.epoch_loop
        if stage != "fit" or isinstance(loop, _JoinedEpochs):
            return
        if not pl_module.automatic_optimization:
            raise ValueError("JoinCallback: automatic_optimization=False is not supported")
        interval = trainer.val_check_interval  # The integer 1 means after each batch.
        is_within = isinstance(interval, int) or interval != 1.0
        if is_within or trainer.check_val_every_n_epoch is None:
            raise ValueError(
                "JoinCallback: validation within an epoch (val_check_interval="
                f"{interval}) is not supported, because a rank without input "
                "cannot validate; use val_check_interval=1.0"
            )
        # The loop may be of either package, lightning or pytorch_lightning.
        loop.__class__ = type("JoinedEpochs", (_JoinedEpochs, type(loop)), {})
        reduce = trainer.strategy.reduce
        trainer.strategy.reduce = lambda tensor, group=None, reduce_op="mean": (
            _mean(tensor, group)
            if torch.is_tensor(tensor) and reduce_op in ("mean", "avg")
            else reduce(tensor, group=group, reduce_op=reduce_op)
        )

    def teardown(self, trainer, pl_module, stage):
        loop = trainer.fit_loop.epoch_loop
        if stage == "fit" and isinstance(loop, _JoinedEpochs):
            loop.__class__ = type(loop).__bases__[1]
            del trainer.strategy.reduce  # That of its class is there again.


def _mean(tensor, group):
    """Returns the mean over the ranks that have input; Lightning divides by the world size."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    values = torch.cat([tensor.detach().to(dtype).flatten(), tensor.new_ones(1, dtype=dtype)])
    dist.all_reduce(values, group=group)
    return (values[:-1] / values[-1]).view_as(tensor)


class _JoinedEpochs:
    """The overridden part of Lightning's _TrainingEpochLoop."""

    def run(self, data_fetcher):
        trainer = self.trainer
        if not isinstance(trainer.model, DistributedDataParallel):
            raise TypeError(
                f"JoinCallback: the model is a {type(trainer.model).__name__} instead of a "
                'DistributedDataParallel; use strategy="ddp"'
            )
        device = trainer.strategy.root_device
        longest = torch.tensor(float(trainer.num_training_batches), device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        if longest == float("inf") and trainer.accumulate_grad_batches > 1:
            raise ValueError("JoinCallback: accumulate_grad_batches needs loaders with a length")
        self._longest = longest.item()  # Infinite if not known.
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        before = self.batch_progress.total.ready
        with Join([trainer.model, *trainer.optimizers, *schedulers, _Progress(self)]):
            super().run(data_fetcher)
            is_last = self.batch_progress.is_last_batch  # Of this rank.
        # The ranks may differ: max_steps may end the epoch at the last batch of some, and a rank
        # may be stopped after the others had no more input.
        states = torch.tensor([is_last, not trainer.should_stop], device=device, dtype=torch.int32)
        dist.all_reduce(states, dist.ReduceOp.MIN)
        is_last, goes_on = states.tolist()
        self.batch_progress.is_last_batch, trainer.should_stop = bool(is_last), not goes_on
        if self.batch_progress.total.ready > before:
            self._validate()

    def _is_trained(self):
        """Returns whether all ranks have trained the epoch; outside of it the ranks agree."""
        if self._longest == float("inf"):
            return self.batch_progress.is_last_batch
        return self.batch_progress.current.ready >= self._longest

    def _should_check_val_fx(self, data_fetcher):
        # Lightning also asks when it resumes: a checkpoint may be from the end of an epoch.
        return self.restarting and self._is_trained() and self._should_check_val_epoch()

    def _should_accumulate(self):
        is_last = self.batch_progress.current.ready >= self._longest
        return not (is_last or self._accumulated_batches_reached())

    def _broadcast_sigterm_tensor(self):
        """Does nothing: rank 0 may have ended, and batches of one step may differ in number."""

    def _validate(self):
        trainer = self.trainer
        is_stopped = trainer.should_stop and trainer.fit_loop._can_stop_early
        if not ((self._is_trained() or is_stopped) and self._should_check_val_epoch()):
            return
        trainer.validating = True
        is_first = trainer._logger_connector._first_loop_iter
        # Lightning validates before it counts the last batch, and a resumed run counts it.
        is_counted = not self._should_accumulate()
        if is_counted:
            trainer.lightning_module.on_validation_model_zero_grad()
        self._batches_that_stepped -= is_counted
        self.val_loop.run()
        self._batches_that_stepped += is_counted
        trainer.training = True
        trainer._logger_connector._first_loop_iter = is_first


class _Progress:
    """Lightning's counters of an epoch, which name files and end the training at max_steps."""

    def __init__(self, loop):
        self._loop = loop
        self._parts = {
            "batches": loop.batch_progress,
            "steps": loop.automatic_optimization.optim_progress,
            "schedulers": loop.scheduler_progress,
        }

    def state_dict(self):
        states = {name: part.state_dict() for name, part in self._parts.items()}
        return {**states, "stepped": self._loop._batches_that_stepped}

    def load_state_dict(self, state):
        self._loop._batches_that_stepped = state["stepped"]
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
