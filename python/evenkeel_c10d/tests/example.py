"""Data-parallel training with torch.distributed on evenkeel; start it with torchrun."""

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from evenkeel_c10d import Join

dist.init_process_group("evenkeel")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)

torch.manual_seed(rank)
inputs = torch.randn(40 + 10 * rank, 8, 16)  # The ranks have different numbers of batches.
with Join([model, optimizer]):
    for batch in inputs:
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()

weights = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = [torch.empty_like(weights) for _ in range(world)]
dist.all_gather(everyone, weights)
assert all(torch.equal(weights, other) for other in everyone)
if rank == 0:
    print(f"{world} ranks have equal weights, last loss {loss.item():.3f}")
dist.destroy_process_group()
