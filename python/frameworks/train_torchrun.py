"""Plain torch.distributed: torchrun starts the ranks again from the checkpoint."""

import task
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from evenkeel_c10d import Join

dist.init_process_group(task.args.backend)
rank = dist.get_rank()
model = DistributedDataParallel(task.model())
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
first = 0
if task.args.resume and task.checkpoint.exists():
    saved = torch.load(task.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"]

for epoch in range(first, task.args.epochs):
    with Join([model, optimizer]):  # Rank 0 may have fewer batches than rank 1.
        for inputs, targets in task.loader(rank):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    optimizer.consolidate_state_dict()  # A collective: after the context.
    if rank == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "epoch": epoch + 1}, task.checkpoint)
    dist.barrier()

task.finish(rank, model.module)
dist.destroy_process_group()
