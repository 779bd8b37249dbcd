"""One rank of a group that checks every collective of the backend."""

import datetime
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import elasticdl
import elasticdl.torch.distributed  # noqa: F401

dist.init_process_group("elasticdl", timeout=datetime.timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
assert dist.get_backend() == "elasticdl"


def each(dtype, shape=(3, 5)):
    """The tensors of all ranks."""
    parts = [torch.arange(1, 16).view(shape) % (r + 2) + r for r in range(size)]
    return [part.to(dtype) for part in parts]


def check(found, expected):
    assert found.dtype == expected.dtype and torch.equal(found, expected), (found, expected)


for dtype in torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8:
    parts = each(dtype)
    whole = torch.stack(parts)
    for op, expected in (
        (dist.ReduceOp.SUM, whole.sum(0).to(dtype)),
        (dist.ReduceOp.MAX, whole.amax(0)),
        (dist.ReduceOp.MIN, whole.amin(0)),
        (dist.ReduceOp.PRODUCT, whole.prod(0).to(dtype)),
    ):
        mine = parts[rank].clone()
        dist.all_reduce(mine, op=op)
        check(mine, expected)
    mine = parts[rank].clone()
    dist.broadcast(mine, size - 1)
    check(mine, parts[-1])
    into = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(into, parts[rank])
    for found, expected in zip(into, parts):
        check(found, expected)
    flat = torch.empty(size * 15, dtype=dtype)
    dist.all_gather_into_tensor(flat, parts[rank].view(-1))
    check(flat, whole.view(-1))
    mine = parts[rank].clone()
    dist.reduce(mine, 1)
    check(mine, whole.sum(0).to(dtype) if rank == 1 else parts[rank])
    into = into if rank == 0 else None
    dist.gather(parts[rank], into, 0)
    for found, expected in zip(into or [], parts):
        check(found, expected)
    rows = [part.repeat(size, 1) for part in parts]
    out = torch.empty(15, dtype=dtype)
    dist.reduce_scatter(out, list(rows[rank].view(size, 15)))
    check(out, whole.sum(0).to(dtype).view(-1))
    out = torch.empty(3, 5, dtype=dtype)
    dist.reduce_scatter_tensor(out, rows[rank])
    check(out, whole.sum(0).to(dtype))
    # As FSDP2 and DTensor gather and reduce several tensors at once.
    both = functional.all_gather_into_tensor_coalesced([parts[rank], rows[rank]], dist.group.WORLD)
    check(both[0] + 0, whole.view(-1, 5))
    check(both[1] + 0, torch.cat(rows))
    dims = [0, 0]
    both = [torch.cat([rows[rank]] * 2), rows[rank]]
    both = functional.reduce_scatter_tensor_coalesced(both, "sum", dims, dist.group.WORLD)
    check(both[0] + 0, whole.sum(0).to(dtype).repeat(2, 1))
    check(both[1] + 0, whole.sum(0).to(dtype))
    # In place, of many elements and of a few.
    for len_ in 15, 100_000:
        flat = torch.full((size * len_,), 7, dtype=dtype)
        flat[rank * len_ : (rank + 1) * len_] = rank
        dist.all_gather_into_tensor(flat, flat[rank * len_ : (rank + 1) * len_])
        check(flat, torch.arange(size).repeat_interleave(len_).to(dtype))
    flat = rows[rank].reshape(-1).clone()
    dist.reduce_scatter_tensor(flat[rank * 15 : (rank + 1) * 15], flat)
    check(flat[rank * 15 : (rank + 1) * 15], whole.sum(0).to(dtype).view(-1))
    mine = torch.empty(3, 5, dtype=dtype)
    dist.scatter(mine, parts if rank == size - 1 else None, size - 1)
    check(mine, parts[rank])
    # Rank r gives rank to `to + 1` rows of r.
    given = torch.full((size * (size + 1) // 2, 2), rank, dtype=dtype)
    taken = torch.empty(size * (rank + 1), 2, dtype=dtype)
    dist.all_to_all_single(taken, given, [rank + 1] * size, list(range(1, size + 1)))
    check(taken, torch.arange(size).repeat_interleave(rank + 1)[:, None].expand(-1, 2).to(dtype))
    taken = [torch.empty(3, 5, dtype=dtype) for _ in range(size)]
    dist.all_to_all(taken, [parts[rank] + to for to in range(size)])
    for found, part in zip(taken, parts):
        check(found, part + rank)
    # Around the ring, twice with one tag; the receives are begun first.
    taken = [torch.empty(5, 3, dtype=dtype).t() for _ in range(2)]
    before, after = (rank - 1) % size, (rank + 1) % size
    receives = [dist.irecv(part, before, tag=7) for part in taken]
    for add in range(2):
        dist.send(parts[rank] + add, after, tag=7)
    for add, (receive, found) in enumerate(zip(receives, taken)):
        receive.wait()
        check(found, parts[before] + add)

mean = torch.full((4,), float(rank))
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
check(mean, torch.full((4,), (size - 1) / 2))
strided = torch.zeros(4, 6)[:, ::2]
strided += rank
work = dist.all_reduce(strided, async_op=True)
work.wait()
assert work.get_future().done()
check(strided.contiguous(), torch.full((4, 3), float(sum(range(size)))))
strided = torch.zeros(2 * size, 4)[:, ::2]
dist.all_gather_into_tensor(strided, torch.full((2, 2), float(rank)))
check(strided[::2, 1].contiguous(), torch.arange(float(size)))
for grads, scale in ((torch.ones(3, dtype=torch.float64), 1.0), (torch.ones(2, 3).t(), 0.5)):
    # With a graph, as a backend sees parameters; and with a factor.
    grads.requires_grad_()
    dist.all_reduce(grads, op=dist._make_nccl_premul_sum(scale))
    check(grads.detach(), torch.full_like(grads, size * scale).detach())
flags = torch.tensor([rank == 0, False, True])
dist.broadcast(flags, 0)
check(flags, torch.tensor([True, False, True]))
flags = [torch.empty(1, dtype=torch.bool) for _ in range(size)]
dist.all_gather(flags, torch.tensor([rank == 1]))
check(torch.cat(flags), torch.arange(size) == 1)
empty = torch.empty(0)
dist.all_reduce(empty)
dist.broadcast(empty, 1)
dist.all_gather([empty] * size, empty)
dist.reduce_scatter(torch.empty(0), [empty] * size)
dist.all_to_all_single(torch.empty(0, 3), torch.empty(0, 3))
several = [torch.full((3,), float(rank)), torch.full((2, 2), rank)]
with dist._coalescing_manager():
    for tensor in several:
        dist.all_reduce(tensor)
check(several[1], torch.full((2, 2), sum(range(size))))
# Without torch.distributed, and by DLPack.
ring = elasticdl.Ring("127.0.0.1")
addresses = [None] * size
dist.all_gather_object(addresses, ring.address)
ring.connect(name="own", secret=b"secret", rank=rank, addresses=addresses, timeout=20.0)
matrix = torch.full((3, 2), float(rank))
ring.all_reduce(matrix)
check(matrix, torch.full((3, 2), float(sum(range(size)))))
numbers = torch.full((5,), rank)
ring.broadcast(1, numbers)
check(numbers, torch.full((5,), 1))
for wrong, expected in (
    (matrix.double(), "sums are of arrays of f32"),
    (matrix.t(), "the tensor is not contiguous"),
):
    try:
        ring.all_reduce(wrong)
    except (BufferError, ValueError) as error:
        assert expected in str(error), error
    else:
        raise AssertionError(expected)
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": r} for r in range(size)]
shared = [rank]
dist.broadcast_object_list(shared, 0)
assert shared == [0]
dist.barrier()

mesh = dist.init_device_mesh("cuda", (1, size), mesh_dim_names=("outer", "inner"))
for group in dist.group.WORLD, mesh["inner"].get_group():
    # One for tensors of both devices.
    backends = {group._get_backend(torch.device(name)) for name in ("cpu", "cuda")}
    assert [backend.name() for backend in backends] == ["elasticdl"], backends
parts = [torch.empty(2) for _ in range(size)]
dist.all_gather(parts, torch.full((2,), float(rank)), group=mesh["inner"].get_group())
check(torch.cat(parts), torch.arange(float(size)).repeat_interleave(2))
pair = dist.new_group([0, 1])
if rank < 2:
    both = torch.ones(3)
    dist.all_reduce(both, group=pair)
    check(both, torch.full((3,), 2.0))
for wrong, expected in (
    (lambda: dist.all_reduce(torch.ones(3).to_sparse()), "dense tensors on the CPU"),
    (lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), op=dist.ReduceOp.AVG), "AVG is not"),
    (lambda: dist.recv(torch.ones(3)), "does not support recvAnysource"),
):
    try:
        wrong()
    except (RuntimeError, ValueError) as error:
        assert expected in str(error), error
    else:
        raise AssertionError(expected)

if os.environ.get("KILL") == str(rank):
    os.kill(os.getpid(), signal.SIGKILL)
if "KILL" in os.environ:
    values = torch.full((10_000,), float(rank))
    try:
        for _ in range(3):
            before = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.AVG)
    except RuntimeError as error:
        check(values, before)
        print("lost:", error)
    else:
        raise AssertionError("a rank was killed, and the others notice nothing")
    os._exit(0)
print("passed", rank)
dist.destroy_process_group()
