"""Ray Train: its TorchTrainer, which starts the ranks again from the last checkpoint."""

import sys
import tempfile

import ray.train
import task
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from evenkeel_c10d import Join


def training(config):
    sys.argv = config["argv"]  # The program's, since this is another process.
    import task

    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(task.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/checkpoint.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    for epoch in range(first, task.args.epochs):
        with Join([model, optimizer]):
            for inputs, targets in task.loader(rank):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, f"{folder}/checkpoint.pt")
            ray.train.report({"epoch": epoch}, ray.train.Checkpoint(folder) if rank == 0 else None)
    task.finish(rank, model.module)


ray.init(num_cpus=2, include_dashboard=False)
trainer = TorchTrainer(
    training,
    train_loop_config={"argv": sys.argv},
    torch_config=TorchConfig(backend=task.args.backend),
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(
        name="run",
        storage_path=str(task.args.folder.resolve()),
        failure_config=ray.train.FailureConfig(max_failures=1),
    ),
)
trainer.fit()
