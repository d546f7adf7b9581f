"""Each operation beside Gloo's, or beside its definition where Gloo lacks it."""

import threading
import time
import unittest

from groups import (  # Before torch: it unsets EVENKEEL_REPLACE_GLOO.
    VERSION,
    assert_is_gloo,
    monitored_barrier,
    run_ranks,
)
import torch
import torch.distributed as dist

WORLDS = (1, 2, 3, 4)
REDUCED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)
MOVED = REDUCED + (
    torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)
GLOO_REDUCES = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)


def values(rank, shape, dtype):
    """Returns small numbers whose sums and products are exact in each type."""
    count = 1
    for size in shape:
        count *= size
    numbers = (torch.arange(count) * (rank + 1) + rank) % 3 + (dtype is not torch.bool)
    return numbers.to(torch.float32).to(dtype).reshape(shape)


def as_bytes(tensor):
    """Returns what can be compared in each type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check_equal(name, got, expected):
    assert len(got) == len(expected), name
    for mine, other in zip(got, expected):
        assert mine.shape == other.shape and mine.dtype == other.dtype, (name, mine, other)
        assert torch.equal(as_bytes(mine), as_bytes(other)), f"{name}: {mine} instead of {other}"


def gathered(world, shape, dtype):
    return [values(rank, shape, dtype) for rank in range(world)]


class Moves:
    """Operations that move data. Each returns what it wrote and what it should have written."""

    def __init__(self, rank, world, group=None):
        self.rank, self.world, self.group = rank, world, group

    def broadcast(self, dtype):
        root = self.world - 1
        tensor = values(self.rank, (3, 2), dtype)
        dist.broadcast(tensor, root, group=self.group)
        return [tensor], [values(root, (3, 2), dtype)]

    def all_gather(self, dtype):
        outputs = [torch.zeros(5, dtype=dtype) for _ in range(self.world)]
        dist.all_gather(outputs, values(self.rank, (5,), dtype), group=self.group)
        return outputs, gathered(self.world, (5,), dtype)

    def all_gather_into_tensor(self, dtype):
        output = torch.zeros(self.world * 2, 3, dtype=dtype)
        dist.all_gather_into_tensor(output, values(self.rank, (2, 3), dtype), group=self.group)
        return [output], [cat(gathered(self.world, (2, 3), dtype))]

    def gather(self, dtype):
        root = self.world - 1
        is_root = self.rank == root
        outputs = [torch.zeros(4, dtype=dtype) for _ in range(self.world)] if is_root else None
        dist.gather(values(self.rank, (4,), dtype), outputs, root, group=self.group)
        return (outputs, gathered(self.world, (4,), dtype)) if is_root else ([], [])

    def scatter(self, dtype):
        root = self.world - 1
        inputs = gathered(self.world, (4,), dtype) if self.rank == root else None
        output = torch.zeros(4, dtype=dtype)
        dist.scatter(output, inputs, root, group=self.group)
        return [output], [values(self.rank, (4,), dtype)]

    def all_to_all(self, dtype):
        # Rank r sends r + s + 1 elements to rank s.
        sizes = [self.rank + other + 1 for other in range(self.world)]
        inputs = [values(self.rank + 7 * other, (size,), dtype) for other, size in enumerate(sizes)]
        outputs = [torch.zeros(size, dtype=dtype) for size in sizes]
        dist.all_to_all(outputs, inputs, group=self.group)
        expected = [values(o + 7 * self.rank, (size,), dtype) for o, size in enumerate(sizes)]
        return outputs, expected

    def all_to_all_single(self, dtype):
        tensor = values(self.rank, (self.world, 3), dtype)
        output = torch.zeros_like(tensor)
        dist.all_to_all_single(output, tensor, group=self.group)
        rows = [values(o, (self.world, 3), dtype)[self.rank] for o in range(self.world)]
        return [output], [cat([row.reshape(1, 3) for row in rows])]

    def all_to_all_single_uneven(self, dtype):
        # Rank r sends s rows to rank s.
        splits = list(range(self.world))
        tensor = values(self.rank, (sum(splits), 2), dtype)
        output = torch.zeros(self.rank * self.world, 2, dtype=dtype)
        dist.all_to_all_single(output, tensor, [self.rank] * self.world, splits, group=self.group)
        begin = sum(splits[: self.rank])
        rows = [values(o, (sum(splits), 2), dtype) for o in range(self.world)]
        return [output], [cat([r[begin : begin + self.rank] for r in rows])]

    def send_recv(self, dtype):
        right, left = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        if self.world == 1:
            return [], []
        outputs = [torch.zeros(3, dtype=dtype), torch.zeros(4, dtype=dtype)]
        works = [
            dist.isend(values(self.rank, (3,), dtype), right, tag=1, group=self.group),
            dist.isend(values(self.rank, (4,), dtype), right, tag=2, group=self.group),
        ]
        # The tags are received in the other order.
        works += [
            dist.irecv(outputs[1], left, tag=2, group=self.group),
            dist.irecv(outputs[0], left, tag=1, group=self.group),
        ]
        for work in works:
            work.wait()
        return outputs, [values(left, (3,), dtype), values(left, (4,), dtype)]


def cat(tensors):
    shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
    return torch.cat([as_bytes(t) for t in tensors]).view(tensors[0].dtype).reshape(shape)


def moves(rank, world):
    for name in [name for name in dir(Moves) if not name.startswith("_")]:
        for dtype in MOVED:
            try:
                got, expected = getattr(Moves(rank, world), name)(dtype)
            except Exception as error:
                raise AssertionError(f"{name} of {dtype}") from error
            check_equal(f"{name} of {dtype}", got, expected)


REDUCTIONS = {
    dist.ReduceOp.SUM: lambda parts: sum(parts[1:], parts[0]),
    dist.ReduceOp.PRODUCT: lambda parts: torch.stack(parts).prod(0, dtype=parts[0].dtype),
    dist.ReduceOp.MIN: lambda parts: torch.stack(parts).amin(0),
    dist.ReduceOp.MAX: lambda parts: torch.stack(parts).amax(0),
    dist.ReduceOp.BAND: lambda parts: fold(torch.bitwise_and, parts),
    dist.ReduceOp.BOR: lambda parts: fold(torch.bitwise_or, parts),
    dist.ReduceOp.BXOR: lambda parts: fold(torch.bitwise_xor, parts),
}
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def fold(function, parts):
    result = parts[0]
    for part in parts[1:]:
        result = function(result, part)
    return result


def reduce_in_all_ways(rank, world, dtype, op, expect):
    """Compares all_reduce, reduce and the reduce_scatters with `expect(list of inputs)`."""
    name = f"{op} of {dtype}"
    expected = expect(gathered(world, (world, 3), dtype))

    tensor = values(rank, (world, 3), dtype)
    dist.all_reduce(tensor, op)
    check_equal(f"all_reduce {name}", [tensor], [expected])

    tensor = values(rank, (world, 3), dtype)
    dist.reduce(tensor, world - 1, op)
    mine = expected if rank == world - 1 else values(rank, (world, 3), dtype)
    check_equal(f"reduce {name}", [tensor], [mine])

    output = torch.zeros(3, dtype=dtype)
    dist.reduce_scatter(output, list(values(rank, (world, 3), dtype)), op)
    check_equal(f"reduce_scatter {name}", [output], [expected[rank]])

    output = torch.zeros(1, 3, dtype=dtype)
    dist.reduce_scatter_tensor(output, values(rank, (world, 3), dtype), op)
    check_equal(f"reduce_scatter_tensor {name}", [output], [expected[rank : rank + 1]])


def reductions(rank, world):
    for op, expect in REDUCTIONS.items():
        for dtype in REDUCED:
            if op in BITWISE and dtype.is_floating_point:
                continue
            reduce_in_all_ways(rank, world, dtype, op, expect)
    for dtype in REDUCED[4:]:
        # Exact, rounded toward zero, at the ends of the type's range, too.
        ends = torch.iinfo(dtype)
        own = [100, ends.max, ends.min, ends.max - rank, ends.min + rank, 7 if rank == 0 else 0]
        sums = [sum(r) for r in zip(*[
            [100, ends.max, ends.min, ends.max - r, ends.min + r, 7 if r == 0 else 0]
            for r in range(world)
        ])]
        means = [abs(s) // world * (1 if s > 0 else -1) for s in sums]
        tensor = torch.tensor(own, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == means, (dtype, tensor, means)
        output = torch.zeros(6, dtype=dtype)
        dist.reduce_scatter(output, [torch.tensor(own, dtype=dtype)] * world, dist.ReduceOp.AVG)
        assert output.tolist() == means, (dtype, output, means)
        tensor = torch.tensor(own, dtype=dtype)
        dist.reduce(tensor, 0, dist.ReduceOp.AVG)
        assert rank > 0 or tensor.tolist() == means, (dtype, tensor, means)
    for dtype in (torch.float32, torch.float64):
        for op, expect in (
            (dist.ReduceOp.AVG, lambda parts: sum(parts[1:], parts[0]) / world),
            (
                dist._make_nccl_premul_sum(0.5),
                lambda parts: sum([part * 0.5 for part in parts[1:]], parts[0] * 0.5),
            ),
        ):
            tensor = values(rank, (7,), dtype)
            dist.all_reduce(tensor, op)
            torch.testing.assert_close(tensor, expect(gathered(world, (7,), dtype)))
            output = torch.zeros(3, dtype=dtype)
            dist.reduce_scatter_tensor(output, values(rank, (world * 3,), dtype), op)
            expected = expect(gathered(world, (world * 3,), dtype)).reshape(world, 3)[rank]
            torch.testing.assert_close(output, expected)


def special_types(rank, world):
    truth = torch.tensor([False, rank == 0, True])
    for op, expected in (
        (dist.ReduceOp.SUM, [False, True, True]),
        (dist.ReduceOp.MAX, [False, True, True]),
        (dist.ReduceOp.PRODUCT, [False, world == 1, True]),
        (dist.ReduceOp.MIN, [False, world == 1, True]),
        (dist.ReduceOp.BAND, [False, world == 1, True]),
        (dist.ReduceOp.BOR, [False, True, True]),
        (dist.ReduceOp.BXOR, [False, True, world % 2 == 1]),
    ):
        tensor = truth.clone()
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == expected, (op, tensor)

        # A true may be any byte but 0, another one on each rank.
        tensor = (truth.to(torch.uint8) << (rank + 1)).view(torch.bool)
        dist.all_reduce(tensor, op)
        check_equal(f"all_reduce {op} of bytes", [tensor], [torch.tensor(expected)])
        output = torch.zeros(3, dtype=torch.bool)
        parts = [(truth.to(torch.uint8) << (rank + 1)).view(torch.bool) for _ in range(world)]
        dist.reduce_scatter(output, parts, op)
        check_equal(f"reduce_scatter {op} of bytes", [output], [torch.tensor(expected)])

    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        tensor = torch.full((3,), 200, dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [200 * world] * 3, tensor
        refuses(NotImplementedError, "MAX", dist.all_reduce, tensor, dist.ReduceOp.MAX)

    tensor = torch.tensor([1 + 2j, 3j]) * (rank + 1)
    dist.all_reduce(tensor)
    total = world * (world + 1) // 2
    torch.testing.assert_close(tensor, torch.tensor([1 + 2j, 3j]) * total)

    small = torch.ones(3).to(torch.float8_e4m3fn)
    refuses(NotImplementedError, "Float8_e4m3fn", dist.all_reduce, small)
    floats = torch.ones(3)
    refuses(NotImplementedError, "BXOR", dist.all_reduce, floats, dist.ReduceOp.BXOR)


def layouts(rank, world):
    # Neither dense nor in order: every second column of a transposed matrix.
    base = torch.zeros(4, 6)
    view = base.t()[::2]
    view.copy_(values(rank, (3, 4), torch.float32))
    dist.all_reduce(view)
    expected = sum(gathered(world, (3, 4), torch.float32))
    assert torch.equal(view, expected) and torch.count_nonzero(base) == 12

    outputs = [torch.zeros(4, 3).t() for _ in range(world)]
    dist.all_gather(outputs, values(rank, (4, 3), torch.float32).t())
    for other in range(world):
        assert torch.equal(outputs[other], values(other, (4, 3), torch.float32).t())

    conj = torch.full((2,), 1 + 2j).conj()
    gathered_conj = torch.zeros(2 * world, dtype=torch.complex64)
    dist.distributed_c10d._get_default_group()._allgather_base(gathered_conj, conj).wait()
    assert gathered_conj.tolist() == [1 - 2j] * (2 * world), gathered_conj

    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == world * (world - 1) / 2
    outputs = [torch.tensor(-1.0) for _ in range(world)]
    dist.all_gather(outputs, torch.tensor(float(rank)))
    assert [int(o) for o in outputs] == list(range(world))

    empty = torch.zeros(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather([torch.zeros(0, 3) for _ in range(world)], empty)
    dist.all_gather_into_tensor(torch.zeros(0, 3), empty)
    dist.all_to_all_single(torch.zeros(0, 3), empty)
    dist.reduce_scatter_tensor(torch.zeros(0, 3), empty)

    leaf = torch.ones(4, requires_grad=True)
    dist.broadcast(leaf, 0)
    with torch.no_grad():
        dist.all_reduce(leaf.view(2, 2).t())
    assert leaf.tolist() == [world] * 4

    # The copy back happens even if no program waits for the work.
    view = torch.zeros(4, 2)[:, 0]
    view.fill_(1)
    dist.all_reduce(view, async_op=True)
    dist.barrier()
    deadline = time.monotonic() + 10
    while view[0] != world and time.monotonic() < deadline:
        time.sleep(0.001)
    assert view.tolist() == [world] * 4, view


def uneven(rank, world):
    outputs = [torch.zeros(other) for other in range(world)]
    dist.all_gather(outputs, torch.full((rank,), float(rank)))
    for other in range(world):
        assert outputs[other].tolist() == [float(other)] * other

    output = torch.zeros(rank + 1)
    inputs = [torch.full((other + 1,), float(rank + other)) for other in range(world)]
    dist.reduce_scatter(output, inputs)
    assert output.tolist() == [sum(range(world)) + world * rank] * (rank + 1), output

    is_root = rank == 0
    parts = [torch.zeros(other + 1) for other in range(world)] if is_root else None
    dist.gather(torch.full((rank + 1,), float(rank)), parts, 0)
    if is_root:
        assert [part.tolist() for part in parts] == [[float(o)] * (o + 1) for o in range(world)]


def coalesced(rank, world):
    group = dist.distributed_c10d._get_default_group()
    tensors = [torch.full((size,), float(rank)) for size in (1, 5, 3)]
    tensors.append(torch.ones(2, dtype=torch.int32))
    group.allreduce_coalesced(tensors).wait()
    total = world * (world - 1) / 2
    assert [t.tolist() for t in tensors] == [[total], [total] * 5, [total] * 3, [world] * 2]

    # A part of a tensor beside the whole: each is reduced once.
    whole = torch.full((4,), float(rank))
    group.allreduce_coalesced([whole, whole[1:3], whole]).wait()
    assert whole.tolist() == [total] * 4, whole

    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        outputs = [torch.zeros(world * size) for size in (2, 3)]
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((len(output) // world,), float(rank)))
    manager.wait()
    for size, output in zip((2, 3), outputs):
        assert output.reshape(world, size)[:, 0].tolist() == list(range(world))

    with dist.distributed_c10d._coalescing_manager() as manager:
        outputs = [torch.zeros(size) for size in (2, 3)]
        for output in outputs:
            dist.reduce_scatter_tensor(output, torch.ones(len(output) * world))
    assert [o.tolist() for o in outputs] == [[world] * 2, [world] * 3]

    # What is refused in a batch leaves the group usable.
    if world > 1:
        wrong = dist.P2POp(dist.isend, torch.ones(1), (rank + 1) % world, tag=-1)
        try:
            dist.batch_isend_irecv([wrong])
        except RuntimeError as error:
            assert "tag" in str(error), error
        else:
            raise AssertionError("a message with a negative tag was sent")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones == world

    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(world)]
    inputs = [torch.full((2,), float(rank)), torch.full((3,), float(-rank))]
    group.allgather_coalesced(lists, inputs).wait()
    for other in range(world):
        assert lists[other][0].tolist() == [other] * 2 and lists[other][1].tolist() == [-other] * 3

    if world > 1:
        received = torch.zeros(2)
        operations = [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert received.tolist() == [(rank - 1) % world] * 2


def refuses(error, words, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except error as caught:
        assert words in str(caught), caught
    else:
        raise AssertionError(f"{function} accepted {args} {kwargs}")


def refusals(rank, world):
    group = dist.distributed_c10d._get_default_group()
    one = torch.ones(2)
    refuses(RuntimeError, "takes one tensor and got 2", group.allreduce, [one, one])
    refuses(RuntimeError, f"the root rank {world}", group.broadcast, one, root=world)
    refuses(RuntimeError, "elements", dist.all_gather_into_tensor, torch.zeros(2 * world + 1), one)
    refuses(
        RuntimeError, "of type Float and got Double",
        group._allgather_base, torch.zeros(2 * world).double(), one,
    )
    refuses(RuntimeError, f"needs {world} outputs", group.allgather, [[one] * (world + 1)], [one])
    refuses(
        RuntimeError, "got parts of the sizes",
        dist.all_to_all_single, torch.zeros(3), torch.zeros(3), [1] * world, [5] * world,
    )
    if world > 1:
        refuses(RuntimeError, "evenly", dist.all_to_all_single, torch.zeros(3 * world + 1),
                torch.zeros(3 * world + 1))
    if world == 1:
        refuses(RuntimeError, "the group has no other rank", dist.recv, one)
    refuses(RuntimeError, "recv from any rank got the tag -1", dist.irecv, one, tag=-1)
    refuses(RuntimeError, "the tag -1", group.send, [one], 0, -1)
    sparse = torch.eye(3).to_sparse()
    refuses(RuntimeError, "Use ReduceOp.SUM", dist.all_reduce, sparse, dist.ReduceOp.MAX)
    if world > 1:
        other = torch.ones(2 + rank // (world - 1), 3).to_sparse()
        refuses(RuntimeError, f"rank {world - 1} Float of shape [3, 3]",
                dist.all_reduce, other)
    dist.barrier()  # The group still works.


def any_source(rank, world):
    if rank > 0:
        for number in range(3):
            dist.send(torch.full((2, 4), 10 * rank + number), 0, tag=5)
        dist.barrier()
        dist.send(torch.full((2,), rank, dtype=torch.int8), 0)
    else:
        following = dict.fromkeys(range(1, world), 0)
        for _ in range(3 * (world - 1)):
            tensor = torch.zeros(4, 2, dtype=torch.long).t()  # Not contiguous.
            sender = dist.recv(tensor, tag=5)
            assert tensor.eq(10 * sender + following[sender]).all(), (sender, tensor)
            following[sender] += 1
        tensors = [torch.zeros(2, dtype=torch.int8) for _ in range(1, world)]
        works = [dist.irecv(tensor) for tensor in tensors]
        refuses(RuntimeError, "before the message has arrived", works[0]._source_rank)
        dist.barrier()
        for tensor, work in zip(tensors, works):
            result = work.get_future().wait()
            assert len(result) == 1 and result[0].data_ptr() == tensor.data_ptr(), result
            work.wait()
            assert tensor.tolist() == [work._source_rank()] * 2
        assert sorted(work._source_rank() for work in works) == list(range(1, world))
    # The sender is a rank of the job, also in a group of some ranks.
    group = dist.new_group(range(1, world))
    if rank == 1 < world - 1:
        dist.send(torch.ones(1), world - 1, group=group)
    elif rank == world - 1 > 1:
        assert dist.recv(torch.zeros(1), group=group) == 1


def sparse_values(rank, dtype):
    """Returns sparse tensors: ranks share rows, bring rows twice, or bring none."""
    rows = torch.arange(rank + 1) % 4
    flat = sparse_of(rows.repeat(2)[None], values(rank, (2 * rank + 2,), dtype), (5,))
    hybrid = sparse_of(rows[None], values(rank, (rank + 1, 3), dtype), (6, 3))
    some, none = (sparse_of(torch.zeros(2, 0), torch.zeros(0, dtype=dtype), (7, 2)) for _ in "ab")
    return [flat, hybrid, values(rank, (7, 2), dtype).to_sparse() if rank == 1 else some, none]


def sparse_of(indices, elements, shape):
    return torch.sparse_coo_tensor(indices.long(), elements, shape, check_invariants=True)


def sparse(rank, world):
    for dtype in REDUCED:
        mine = sparse_values(rank, dtype)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in mine]
        for work in works:
            work.wait()
        expected = [
            sum(tensors[1:], tensors[0].to_dense())
            for tensors in zip(*(
                [tensor.to_dense() for tensor in sparse_values(o, dtype)] for o in range(world)
            ))
        ]
        assert all(tensor.is_sparse and tensor.is_coalesced() for tensor in mine)
        check_equal(f"sparse all_reduce of {dtype}", [t.to_dense() for t in mine], expected)
        result = works[1].get_future().wait()[0]
        check_equal("its future", [result.to_dense()], expected[1:2])
    # Rank by rank: float32 has no 1e8 + 1.
    ordered = sparse_of(torch.zeros(1, 1), torch.tensor([(1e8, 1.0, -1e8, 0.0)[rank]]), (2,))
    dist.all_reduce(ordered)
    assert ordered.to_dense()[0] == (1e8, 1e8, 0, 0)[world - 1], ordered


def refuses_a_collective_without_order(rank, world):
    future = dist.irecv(torch.zeros(1), (rank - 1) % world).get_future()
    called = future.then(lambda _: dist.barrier())
    dist.barrier()  # Every rank has attached its callback.
    dist.send(torch.zeros(1), (rank + 1) % world)
    try:
        called.wait()
    except RuntimeError as error:
        assert "barrier was called in a callback" in str(error), error
    else:
        raise AssertionError("the callback's barrier has no place in the order")
    dist.barrier()  # The group still works.


def works(rank, world):
    # Before torch 2.14 the group has no numbers for backends that are not torch's own.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work.wait() and work.is_completed() and work.is_success()
    assert work.result()[0].tolist() == [world] * 3
    assert backend._get_sequence_number_for_group() == before + 1

    # A callback calls a collective.
    tensor = torch.ones(2)

    def again(future):
        dist.all_reduce(future.value()[0])
        return future.value()[0] * 2

    assert dist.all_reduce(tensor, async_op=True).get_future().then(again).wait().tolist() == [
        2 * world**2
    ] * 2

    # A callback waits for another future, as the hook of PowerSGD does.
    def nested(future):
        inner = dist.all_reduce(future.value()[0], async_op=True).get_future()
        return inner.then(lambda f: f.value()[0] * 2).wait()

    future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(nested)
    assert future.wait().tolist() == [2 * world**2] * 2

    # Callbacks run where they are attached, so that ranks agree on the order of their collectives.
    seen = []
    future = dist.barrier(async_op=True).get_future()
    future.add_done_callback(lambda _: seen.append(threading.get_ident()))
    chained = future.then(lambda _: seen.append(threading.get_ident()))
    chained.then(lambda _: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()] * 3, seen

    # As with Gloo, a future is complete when wait() returns, also one whose results are copied.
    for _ in range(100):
        early, late = (
            dist.all_reduce(torch.ones(2, 3).t(), async_op=True) for _ in range(2)
        )
        future = early.get_future()
        for work in (early, late):
            work.wait()
        assert future.done() and future.value()[0].tolist() == [[world] * 2] * 3
        assert late.get_future().value()[0].tolist() == [[world] * 2] * 3

    outputs = [torch.zeros(1) for _ in range(world)]
    future = dist.all_gather(outputs, torch.tensor([float(rank)]), async_op=True).get_future()
    assert [int(t) for t in future.wait()] == list(range(world))
    assert dist.barrier(async_op=True).get_future().wait() == []

    futures = [dist.all_reduce(torch.ones(100), async_op=True).get_future() for _ in range(50)]
    for future in torch.futures.wait_all(futures):
        assert future[0][0] == world

    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(world)]
    monitored_barrier()

    memory = backend.allocate_tensor(100, dtype=torch.float32, device=torch.device("cpu"))
    assert memory.shape == (100,) and memory.count_nonzero() == 0
    memory += 1
    dist.all_reduce(memory)
    assert memory.tolist() == [world] * 100
    for size in (2**61, 2**62, -1):  # 2**62 floats are 2**64 bytes.
        try:
            backend.allocate_tensor(size, dtype=torch.float32, device=torch.device("cpu"))
            raise AssertionError(size)
        except RuntimeError as error:
            assert f"{size} elements" in str(error), error
    if world > 1:
        rows, sizes = torch.ones(world), [1, 2**63 - 1] + [1] * (world - 2)  # Their sum overflows.
        try:
            dist.all_to_all_single(torch.ones(world), rows, [1] * world, sizes)
            raise AssertionError("rows that do not exist")
        except RuntimeError as error:
            assert f"parts of the sizes 1 {2**63 - 1}" in str(error), error
    assert backend.name() == "evenkeel"
    if VERSION >= (2, 14):  # Older bindings have no options.
        assert backend.options._timeout.total_seconds() > 0


def beside_gloo(rank, world):
    gloo = dist.new_group(backend="gloo")
    assert_is_gloo(gloo)
    for dtype in GLOO_REDUCES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            torch.manual_seed(rank)
            tensor = (torch.randn(1000) * 4).to(dtype)
            mine, other = tensor.clone(), tensor.clone()
            dist.all_reduce(mine, op)
            dist.all_reduce(other, op, group=gloo)
            if world == 2 or not dtype.is_floating_point:
                check_equal(f"{op} of {dtype}", [mine], [other])
                continue
            # The order of additions differs; neither may be further from the truth.
            exact = tensor.double()
            dist.all_reduce(exact, op)
            errors = [(result.double() - exact).abs().sum().item() for result in (mine, other)]
            assert errors[0] <= errors[1] * 1.1 + 1e-12, (op, dtype, errors)
    for name in [name for name in dir(Moves) if not name.startswith("_")]:
        if name == "all_to_all":
            continue  # Gloo's needs lists of equal sizes.
        got, _ = getattr(Moves(rank, world), name)(torch.float32)
        other, _ = getattr(Moves(rank, world, gloo), name)(torch.float32)
        check_equal(name, got, other)


def many_in_flight(rank, world):
    """Issuing one costs the same, however many are under way."""
    store = dist.distributed_c10d._get_default_store()

    def seconds_each(count):
        tensors = [torch.ones(1) for _ in range(count)]
        if rank == 0:
            store.wait([f"issued {count}"])  # So far none has ended.
        begin = time.thread_time()
        all_works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        seconds = (time.thread_time() - begin) / count
        store.set(f"issued {count}", "")
        for work in all_works:
            work.wait()
        return seconds

    few, many = seconds_each(500), seconds_each(4000)
    if rank == 1:
        assert many < 3 * few, (few, many)


class OperationsTest(unittest.TestCase):
    def run_all(self, function):
        for world in WORLDS:
            with self.subTest(world=world):
                run_ranks(world, function)

    def test_moves_every_type(self):
        self.run_all(moves)

    def test_reduces_every_type(self):
        self.run_all(reductions)

    def test_special_types(self):
        self.run_all(special_types)

    def test_layouts(self):
        self.run_all(layouts)

    def test_uneven_sizes(self):
        self.run_all(uneven)

    def test_coalesced(self):
        self.run_all(coalesced)

    def test_sparse(self):
        self.run_all(sparse)

    def test_any_source(self):
        for world in (2, 3, 5):
            run_ranks(world, any_source)

    def test_refuses_wrong_arguments(self):
        self.run_all(refusals)

    def test_works_and_futures(self):
        self.run_all(works)

    def test_refuses_a_collective_without_order(self):
        run_ranks(3, refuses_a_collective_without_order)

    def test_many_in_flight(self):
        run_ranks(2, many_in_flight)

    def test_equals_gloo(self):
        self.run_all(beside_gloo)


if __name__ == "__main__":
    unittest.main()
