"""Lightning: its DDP strategy, a checkpoint per epoch, accumulated gradients, a reduced metric."""

import lightning
import task
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from evenkeel_c10d.lightning import JoinCallback


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = task.model()

    def training_step(self, batch):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(inputs))
        return loss

    def validation_step(self, batch):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        self.log("validation", loss, sync_dist=True, batch_size=len(inputs))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self):
        return task.loader(self.global_rank)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(task.dataset(), batch_size=task.BATCH)


checkpoints = ModelCheckpoint(task.args.folder, filename="checkpoint", enable_version_counter=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=task.args.backend),
    max_epochs=task.args.epochs,
    max_steps=task.args.steps,
    accumulate_grad_batches=1 if task.args.unsized else 2,
    use_distributed_sampler=False,
    callbacks=[checkpoints, *([JoinCallback()] if task.args.uneven else [])],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Regression()
trainer.fit(module, ckpt_path=task.args.folder / "checkpoint.ckpt" if task.args.resume else None)
assert type(trainer.fit_loop.epoch_loop).__name__ == "_TrainingEpochLoop"  # As it was.
figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
figures |= {"steps": trainer.global_step, "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped}
task.finish(module.global_rank, module.model, **figures)
