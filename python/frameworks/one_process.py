"""The training of train_lightning.py with uneven inputs, in one process that adds all gradients."""

import itertools

import task
import torch
from torch.nn.functional import mse_loss

WORLD, ACCUMULATED = 2, 2

model = task.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
batches = list(itertools.zip_longest(*(task.loader(rank) for rank in range(WORLD))))
steps = 0
for _ in range(task.args.epochs):
    losses = []
    for number, of_ranks in enumerate(batches):
        present = [batch for batch in of_ranks if batch is not None]
        values = [mse_loss(model(inputs), targets) for inputs, targets in present]
        sum(values).div(WORLD * ACCUMULATED).backward()
        losses.append([value.item() for value in values])
        if (number + 1) % ACCUMULATED == 0 or number + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    scheduler.step()

inputs, targets = task.dataset()[:]
average = sum(map(sum, losses)) / sum(map(len, losses))
figures = {"loss": average, "loss_epoch": average, "steps": steps, "stepped": steps}
figures["validation"] = mse_loss(model(inputs), targets).item()
for rank in range(WORLD):
    of_step = losses[len(task.loader(rank)) - 1]  # A rank logs no step after its own last batch.
    task.finish(rank, model, loss_step=sum(of_step) / len(of_step), **figures)
