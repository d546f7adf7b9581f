"""torchft: each process is a replica, and the others go on without one that is lost."""

import os

import task
import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupWrapper

from evenkeel_c10d import ProcessGroup


class ProcessGroupEvenkeel(ProcessGroupWrapper):
    def _create_pg(self, store, rank, world_size):
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group = dist.ProcessGroup(store, rank, world_size)
        backend = ProcessGroup(store, rank, world_size, self._timeout)
        group._register_backend(torch.device("cpu"), kind, backend)
        group._set_default_backend(kind)
        return group

    def getBackendName(self):
        return "torchft-evenkeel"


replica, port = int(os.environ["RANK"]), os.environ["MASTER_PORT"]
if replica == 0:
    lighthouse = LighthouseServer(f"127.0.0.1:{port}", min_replicas=1, join_timeout_ms=10_000)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
model = task.model()
adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
parts = {"model": model, "optimizer": adam}
manager = Manager(
    pg=ProcessGroupEvenkeel() if task.args.backend == "evenkeel" else ProcessGroupGloo(),
    load_state_dict=lambda saved: [parts[name].load_state_dict(saved[name]) for name in parts],
    state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
    min_replica_size=1 if task.args.lose else 2,
    **{"rank": 0, "world_size": 1, "store_addr": "127.0.0.1", "store_port": store.port},
    lighthouse_addr=f"http://127.0.0.1:{port}",
    replica_id=f"replica{replica}",
)
everything = {**parts, "manager": manager}
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adam)
if task.args.resume:
    for name, part in everything.items():
        part.load_state_dict(torch.load(task.checkpoint)[name])
batches = list(task.loader(replica))
while (step := manager.current_step()) < 8 * task.args.epochs:
    inputs, targets = batches[step % 8]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
    optimizer.step()
if replica == 0:
    torch.save({name: part.state_dict() for name, part in everything.items()}, task.checkpoint)
task.finish(replica, model)
manager.shutdown()
