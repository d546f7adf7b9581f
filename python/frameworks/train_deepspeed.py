"""DeepSpeed: its engine with ZeRO stage 1 on the CPU."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import task
import torch

deepspeed.init_distributed(dist_backend=task.args.backend)
model = task.model()
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    training_data=task.dataset(),
    config={
        "train_micro_batch_size_per_gpu": task.BATCH,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
first = 0
if task.args.resume:
    _, state = engine.load_checkpoint(task.args.folder)
    first = state["epoch"]

for epoch in range(first, task.args.epochs):
    loader.data_sampler.set_epoch(epoch)
    for inputs, targets in loader:
        engine.backward(torch.nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
    engine.save_checkpoint(task.args.folder, client_state={"epoch": epoch + 1})

task.finish(torch.distributed.get_rank(), engine.module)
torch.distributed.destroy_process_group()
