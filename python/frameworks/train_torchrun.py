"""Plain torch.distributed: a checkpoint is saved beside the training of the next epoch."""

import task
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from evenkeel_c10d import Join

dist.init_process_group(task.args.backend)
beside = dist.new_group()  # The thread that saves calls collectives, so it has its own group.
rank = dist.get_rank()
model = DistributedDataParallel(task.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state(epoch):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "epoch": epoch}


complete = sorted(task.args.folder.glob("epoch*/.metadata"))
first, saving = 0, None
if task.args.resume and complete:
    saved = state(0)
    dcp.load(saved, checkpoint_id=complete[-1].parent)
    first = saved["epoch"]
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )

for epoch in range(first, task.args.epochs):
    with Join([model, optimizer]):  # Rank 0 may have fewer batches than rank 1.
        for inputs, targets in task.loader(rank):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    if saving is not None:
        saving.result()
    folder = task.args.folder / f"epoch{epoch + 1}"
    saving = dcp.async_save(state(epoch + 1), checkpoint_id=folder, process_group=beside)

if saving is not None:
    saving.result()
task.finish(rank, model.module)
dist.destroy_process_group()
