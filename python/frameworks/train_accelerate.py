"""accelerate: the dataset is shared out by batches, so a rank may have one more than the other."""

import task
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs

from evenkeel_c10d import Join

accelerator = Accelerator(
    cpu=True,
    kwargs_handlers=[InitProcessGroupKwargs(backend=task.args.backend)],
    dataloader_config=DataLoaderConfiguration(even_batches=False),
)
model = task.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, gamma=0.5)
loader = torch.utils.data.DataLoader(task.dataset(), batch_size=task.BATCH)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
checkpoint = task.args.folder / "checkpoint"
first = 0
if task.args.resume:
    accelerator.load_state(checkpoint)
    first = scheduler.state_dict()["last_epoch"] // 16  # It steps once for each rank.

for _ in range(first, task.args.epochs):
    with Join([model, optimizer, scheduler]):  # accelerate's join_uneven_inputs needs GPUs.
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            scheduler.step()
    accelerator.save_state(checkpoint)

task.finish(accelerator.process_index, accelerator.unwrap_model(model))
accelerator.end_training()
