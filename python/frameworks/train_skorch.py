"""skorch: a net whose module is a DistributedDataParallel, and a checkpoint per epoch."""

import skorch
import task
import torch
import torch.distributed as dist
from skorch.callbacks import Checkpoint
from torch.nn.parallel import DistributedDataParallel

from evenkeel_c10d import Join

dist.init_process_group(task.args.backend)
rank = dist.get_rank()


class Net(skorch.NeuralNet):
    def initialized_instance(self, instance_or_cls, kwargs):
        instance = super().initialized_instance(instance_or_cls, kwargs)
        if isinstance(instance, torch.nn.Sequential):
            return DistributedDataParallel(instance)
        return instance

    def run_single_epoch(self, iterator, training, **kwargs):
        with Join([self.module_, self.optimizer_], enable=training):
            super().run_single_epoch(iterator, training, **kwargs)


checkpoint = Checkpoint(
    dirname=task.args.folder / f"rank{rank}", monitor=None, load_best=False, f_criterion=None
)
net = Net(
    task.model,
    criterion=torch.nn.MSELoss,
    optimizer=torch.optim.AdamW,
    lr=1e-2,
    batch_size=task.BATCH,
    train_split=None,
    callbacks=[checkpoint],
    verbose=0,
)
net.initialize()
if task.args.resume:
    net.load_params(checkpoint=checkpoint)
net.partial_fit(task.loader(rank).dataset, epochs=task.args.epochs - len(net.history))
task.finish(rank, net.module_.module)
dist.destroy_process_group()
