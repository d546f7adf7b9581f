"""ignite: its engine, handlers that open a Join context around each epoch, and a checkpoint."""

import contextlib

import ignite.distributed as idist
import task
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

from evenkeel_c10d import Join


def join(trainer, *joinables):
    """Trains each epoch with uneven inputs."""
    context = contextlib.ExitStack()
    enter = lambda: context.enter_context(Join(joinables))  # noqa: E731
    trainer.add_event_handler(Events.EPOCH_STARTED, enter)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, context.close)


def training(local_rank):
    model = idist.auto_model(task.model())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def update(engine, batch):
        inputs, targets = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    join(trainer, model, optimizer)
    state = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = DiskSaver(task.args.folder, create_dir=False, require_empty=False)
    name = "checkpoint.{ext}"
    save = Checkpoint(state, saver, filename_pattern=name, include_self=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, save)
    if task.args.resume:
        Checkpoint.load_objects(state, torch.load(task.checkpoint))
    trainer.run(task.loader(idist.get_rank()), max_epochs=task.args.epochs)
    task.finish(idist.get_rank(), model.module)


with idist.Parallel(backend=task.args.backend) as parallel:
    parallel.run(training)
