"""The model, the data and the arguments of the programs in this folder.

    program.py FOLDER [--backend NAME] [--epochs N] [--uneven [--unsized]] [--resume]
               [--steps N] [--lose STEP]

It also observes the steps of all optimizers, for promises.py: `--lose` kills rank 1 after a step,
and each rank writes its weights, times of steps and its exception to FOLDER.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--backend", default="gloo")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--uneven", action="store_true", help="unequal numbers of batches")
parser.add_argument("--unsized", action="store_true", help="loaders without a length")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--steps", type=int, default=-1, help="at most; of Lightning")
parser.add_argument("--lose", type=int, default=0, metavar="STEP")
args = parser.parse_args()
args.folder.mkdir(parents=True, exist_ok=True)
checkpoint = args.folder / "checkpoint.pt"

BATCH = 8
_times = []


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def dataset():
    """Returns the samples of all ranks for a framework to share out: 16 batches, or 15."""
    count = BATCH * (15 if args.uneven else 16)
    inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loader(rank):
    """Returns the batches of a rank: 8 on each, or 5 on rank 0 and 7 on rank 1."""
    samples = dataset()
    last = BATCH * (5 if args.uneven else 8)
    own = range(last) if rank == 0 else range(8 * BATCH, len(samples))
    subset = torch.utils.data.Subset(samples, own)
    subset = _Unsized(subset) if args.unsized else subset
    return torch.utils.data.DataLoader(subset, batch_size=BATCH)


class _Unsized(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self._samples = samples

    def __iter__(self):
        return (self._samples[index] for index in range(len(self._samples)))


def finish(rank, module, **figures):
    """Writes the files that promises.py compares."""
    if os.environ.get("EVENKEEL_REPLACE_GLOO") == "1":
        import evenkeel_c10d  # Here, since other programs get evenkeel by its name alone.

        evenkeel_c10d.transport()  # Raises if the group is Gloo's.
    torch.save(dict(module.state_dict()), args.folder / f"weights{rank}.pt")
    (args.folder / f"steps{rank}.json").write_text(json.dumps(_times))
    (args.folder / f"figures{rank}.json").write_text(json.dumps(figures))


def _after_step(*_):
    _times.append(time.perf_counter())
    killed = args.folder / "killed"  # Once: it may be started again.
    if len(_times) == args.lose and _rank() == 1 and not killed.exists():
        killed.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def _rank():
    is_set = torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_set else int(os.environ.get("RANK", 0))


def _report(kind, error, traceback):
    text = f"{time.time()}\n{kind.__name__}: {error}"
    (args.folder / f"error{_rank()}").write_text(text)
    sys.__excepthook__(kind, error, traceback)


register_optimizer_step_post_hook(_after_step)
sys.excepthook = _report
