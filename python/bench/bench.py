"""Compares evenkeel under PyTorch with Gloo, oneCCL, Open MPI and MPICH.

    python bench.py collectives --peers=gloo,openmpi,mpich,oneccl --worlds=2,4
    python bench.py steps --worlds=2          # DistributedDataParallel over evenkeel and over Gloo
    sudo python bench.py collectives --peers=gloo --link=1gbit   # one network namespace per rank

Prints tables in Markdown. Each process holds both libraries and times them in turn, in blocks of
some 0.3 s (steps: 1 s) that begin with a barrier; each table cell is the median of the ratios of
--rounds pairs of blocks, with their 10th and 90th percentile. In shorter blocks much of the time
would depend on the cores to which the other library's block has moved the threads. A size is that
of the whole tensor: the one that is reduced or scattered, or the one that gathers.

Needs torch and the wheel of evenkeel_c10d. Open MPI and MPICH: mpi4py from PyPI and Debian's
openmpi-bin and mpich. oneCCL: `pip install oneccl-devel` into an environment of its own, named by
--oneccl.
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.pop("EVENKEEL_REPLACE_GLOO", None)  # Import torch reads it; the reference is Gloo.

HERE = pathlib.Path(__file__).resolve()
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
BLOCK_S = {"collectives": 0.3, "steps": 1.0}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("collectives", "steps"))
    parser.add_argument("--peers", default="gloo", help="libraries to compare with")
    parser.add_argument("--worlds", default="2", help="numbers of ranks")
    parser.add_argument("--sizes", default="1,16,256,4096,65536", help="KiB")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of blocks")
    parser.add_argument("--oneccl", type=pathlib.Path, help="environment that has oneccl-devel")
    parser.add_argument("--link", default="", help="rate of a link between the ranks: 1gbit")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)  # In a rank: peer,world,folder
    return parser.parse_args()


# The libraries. Each takes tensors for `full` (world * part elements), `part` and `other` (as full),
# and gives functions by operation.


class OverTorch:
    def __init__(self, group):
        import torch.distributed as dist

        self.dist, self.group = dist, group

    def barrier(self):
        self.dist.barrier(group=self.group)

    def functions(self, full, part, other):
        dist, group = self.dist, self.group
        return {
            "all_reduce": lambda: dist.all_reduce(full, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(full, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full, group=group),
            "all_to_all": lambda: dist.all_to_all_single(other, full, group=group),
        }


class OverMpi:
    def __init__(self):
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD

    def barrier(self):
        self.comm.Barrier()

    def functions(self, full, part, other):
        comm = self.comm
        full, part, other = full.numpy(), part.numpy(), other.numpy()
        return {
            "all_reduce": lambda: comm.Allreduce(self.mpi.IN_PLACE, full),
            "all_gather": lambda: comm.Allgather(part, full),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(full, part),
            "all_to_all": lambda: comm.Alltoall(full, other),
        }


class OverOneCcl:
    def __init__(self, library, rank, world, store):
        self.library = ctypes.CDLL(library)
        self.library.oneccl_address_bytes.restype = ctypes.c_size_t
        address = ctypes.create_string_buffer(self.library.oneccl_address_bytes())
        if rank == 0:
            self.check(self.library.oneccl_create_address(address))
            store.set("oneccl", address.raw)
        address.raw = store.get("oneccl")
        self.check(self.library.oneccl_join(rank, world, address))
        self.one = ctypes.c_float(0)

    @staticmethod
    def check(code):
        if code != 0:
            raise RuntimeError("oneCCL failed")

    def barrier(self):
        self.check(self.library.oneccl_all_reduce(ctypes.byref(self.one), ctypes.c_size_t(1)))

    def functions(self, full, part, other):
        def call(function, *tensors, count):
            pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
            return lambda: self.check(function(*pointers, ctypes.c_size_t(count)))

        library, count = self.library, part.numel()
        return {
            "all_reduce": call(library.oneccl_all_reduce, full, count=full.numel()),
            "all_gather": call(library.oneccl_all_gather, part, full, count=count),
            "reduce_scatter": call(library.oneccl_reduce_scatter, full, part, count=count),
            "all_to_all": call(library.oneccl_all_to_all, full, other, count=count),
        }


# In a rank.


class Rank:
    def __init__(self, options):
        import torch
        import torch.distributed as dist

        peer, world, folder = options.rank.split(",")
        mpi = OverMpi() if peer in ("openmpi", "mpich") else None
        self.rank = mpi.comm.Get_rank() if mpi else int(os.environ["RANK"])
        self.world = int(world)
        self.options = options
        torch.set_num_threads(1)
        dist.init_process_group(
            "evenkeel", init_method=f"file://{folder}/store", rank=self.rank, world_size=self.world
        )
        self.gloo = dist.new_group(backend="gloo") if peer == "gloo" else None
        assert self.gloo is None or isinstance(
            self.gloo._get_backend(torch.device("cpu")), dist.ProcessGroupGloo
        )
        self.ours = OverTorch(dist.group.WORLD)
        store = dist.distributed_c10d._get_default_store()
        self.peer = mpi or (
            OverTorch(self.gloo)
            if peer == "gloo"
            else OverOneCcl(f"{folder}/oneccl.so", self.rank, self.world, store)
        )

    def largest(self, value):
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([float(value)], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def block(self, library, function, calls):
        library.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - begin) / calls

    def pairs(self, parties):
        """Returns the seconds of a call by party and round; `parties`: (library, function)."""
        calls = []
        for library, function in parties:
            self.block(library, function, 2)
            once = self.largest(self.block(library, function, 3))
            calls.append(max(int(BLOCK_S[self.options.what] / once), 1))
        times = [[] for _ in parties]
        for turn in range(self.options.rounds):
            order = range(len(parties)) if turn % 2 == 0 else reversed(range(len(parties)))
            for index in order:
                times[index].append(self.block(*parties[index], calls[index]))
        return times

    def collectives(self):
        import torch

        results = []
        for size in self.options.sizes.split(","):
            part = torch.zeros(int(size) * 256 // self.world).fill_(0)
            full = torch.zeros(part.numel() * self.world).fill_(0)
            other = torch.zeros_like(full).fill_(0)
            ours = self.ours.functions(full, part, other)
            theirs = self.peer.functions(full, part, other)
            for operation in OPERATIONS:
                parties = [(self.ours, ours[operation]), (self.peer, theirs[operation])]
                results.append((operation, int(size), self.pairs(parties)))
        return results

    def steps(self):
        from torch.nn.parallel import DistributedDataParallel

        results = []
        for name, make in MODELS.items():
            parties = []
            for group in (None, self.ours.group, self.gloo):
                model, loss = make()
                if group is not None:
                    model = DistributedDataParallel(model, process_group=group)
                parties.append((self.ours, training_step(model, loss)))
            results.append((name, 0, self.pairs(parties)))
        return results


def training_step(model, loss):
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def mlp():
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    images, labels = torch.randn(64, 784), torch.randint(10, (64,))
    return nn.Sequential(*layers), lambda model: nn.functional.cross_entropy(model(images), labels)


def gpt():
    import torch
    from torch import nn

    class Gpt(nn.Module):
        def __init__(self, vocabulary=256, width=128, layers=4, heads=4, context=128):
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.positions = nn.Parameter(torch.zeros(context, width))
            block = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.mask = nn.Transformer.generate_square_subsequent_mask(context)

        def forward(self, tokens):
            hidden = self.tokens(tokens) + self.positions
            return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))

    torch.manual_seed(0)
    text = torch.randint(256, (4, 129))

    def loss(model):
        logits = model(text[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    return Gpt(), loss


MODELS = {"MLP": mlp, "GPT": gpt}


def run_rank(options):
    import torch.distributed as dist

    rank = Rank(options)
    results = getattr(rank, options.what)()
    rank.ours.barrier()
    if rank.rank == 0:
        print("results", json.dumps(results), flush=True)
    dist.destroy_process_group()


# In the process that starts the ranks.


class Link:
    """A network namespace for each rank, and links of that rate to a bridge."""

    def __init__(self, world, rate):
        self.names = [f"evenkeel{rank}" for rank in range(world)] if rate else []
        self.rate = rate

    def __enter__(self):
        try:
            self.make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def make(self):
        def run(*words):
            subprocess.run(words, check=True)

        if self.names:
            run("ip", "link", "add", "evenkeel", "type", "bridge")
            run("ip", "link", "set", "evenkeel", "up")
        for rank, name in enumerate(self.names):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"{name}b", "type", "veth", "peer", "eth0", "netns", name)
            run("ip", "link", "set", f"{name}b", "master", "evenkeel", "up")
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "address", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            run(*inside, "ip", "link", "set", "eth0", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            shape = ("tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms")
            run(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)
        if self.names:
            subprocess.run(["ip", "link", "delete", "evenkeel"], check=False)

    def inside(self, rank):
        return ["ip", "netns", "exec", self.names[rank]] if self.names else []

    def variables(self, rank):
        if not self.names:
            return {}
        address = f"10.77.0.{rank + 1}"
        return {"EVENKEEL_ADDRESS": address, "GLOO_SOCKET_IFNAME": "eth0"}


def build_oneccl(environment, folder):
    lib = environment / "lib"
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{environment}/include",
         HERE.with_name("oneccl.cc"), "-o", f"{folder}/oneccl.so", f"{lib}/libccl.so.1",
         f"-Wl,-rpath,{lib},-rpath-link,{lib},--disable-new-dtags"],
        check=True,
    )


def measure(options, peer, world):
    with tempfile.TemporaryDirectory() as folder, Link(world, options.link) as link:
        command = [sys.executable, HERE, *sys.argv[1:], f"--rank={peer},{world},{folder}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if peer == "oneccl":
            build_oneccl(options.oneccl, folder)
        starters = {"openmpi": ["mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe",
                                "--bind-to", "none", "-n", str(world)],
                    "mpich": ["mpiexec.mpich", "-n", str(world)]}
        if peer in starters:
            environment["MPI4PY_MPIABI"] = peer
            if peer == "mpich":  # mpi4py looks for it under MPICH's name, and not Debian's.
                os.symlink("/usr/lib/x86_64-linux-gnu/libmpich.so.12", f"{folder}/libmpi.so.12")
                environment["LD_LIBRARY_PATH"] = folder
            ranks = [(starters[peer] + command, environment)]
        else:
            ranks = [
                (link.inside(rank) + command,
                 environment | {"RANK": str(rank)} | link.variables(rank))
                for rank in range(world)
            ]
        processes = [
            subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True)
            for words, variables in ranks
        ]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    sys.exit(f"{peer} with {world} ranks failed")
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
        out = "".join(process.communicate()[0] for process in processes)
        lines = [line for line in out.splitlines() if line.startswith("results ")]
        if not lines:
            sys.exit(f"{peer} with {world} ranks printed no results: {out}")
        return json.loads(lines[0].partition(" ")[2])


def text_of(seconds):
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def ratio(over, under):
    ratios = [a / b for a, b in zip(over, under)]
    tenths = statistics.quantiles(ratios, n=10)
    return f"{statistics.median(ratios):.2f} [{tenths[0]:.2f}, {tenths[-1]:.2f}]"


def print_collectives(options, world):
    peers = options.peers.split(",")
    rows = {}
    for peer in peers:
        for operation, size, (ours, theirs) in measure(options, peer, world):
            row = rows.setdefault((operation, size), [])
            if not row:
                row.append(text_of(statistics.median(ours)))
            row.append(f"{text_of(statistics.median(theirs))}, {ratio(theirs, ours)}")
    print(f"\n{world} ranks: time of evenkeel; of the others, and theirs over evenkeel's\n")
    print("| operation | KiB | evenkeel |", " | ".join(peers), "|")
    print("|---|---|---|" + "---|" * len(peers))
    for (operation, size), row in sorted(rows.items()):
        print(f"| {operation} | {size} |", " | ".join(row), "|", flush=True)


def print_steps(options, world):
    print(f"\n{world} ranks: a training step of all ranks at once, and over that without DDP\n")
    print("| model | local | DDP over evenkeel | DDP over Gloo | evenkeel / local | Gloo / local |")
    print("|---|---|---|---|---|---|")
    for name, _, (local, ours, gloo) in measure(options, "gloo", world):
        times = " | ".join(text_of(statistics.median(times)) for times in (local, ours, gloo))
        print(f"| {name} | {times} | {ratio(ours, local)} | {ratio(gloo, local)} |", flush=True)


def main():
    options = arguments()
    if options.link and {"openmpi", "mpich", "oneccl"} & set(options.peers.split(",")):
        sys.exit("bench.py: --link puts ranks of Gloo into namespaces, and none of MPI or oneCCL")
    if options.rank:
        return run_rank(options)
    for world in options.worlds.split(","):
        (print_collectives if options.what == "collectives" else print_steps)(options, int(world))
    return None


if __name__ == "__main__":
    main()
