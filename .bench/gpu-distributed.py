#!/usr/bin/env python3
"""Checks the backend of torch.distributed on one GPU: `gpu-distributed.py [--json FILE]`.

Needs PyTorch, and the package on PYTHONPATH. Several ranks share the GPU. Each check does the same
with tensors on the CPU and on the GPU, whose results must be equal to the last bit, over the host's
memory and over NCCL:

    operations  each one, of several types, with parts that are not contiguous or empty
    streams     the tensors are written just before on a stream that is late, and read just after
                on another one, over and over in the same memory
    failure     a rank ends: the others raise an error, and their tensors are as before
    programs    DDP, FSDP2, and DTensor on a mesh of "cuda" (PyTorch 2.15 or newer)

`--device cpu` tries the script.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from elasticdl import _elasticdl
from elasticdl.torch._collectives import Collectives
from elasticdl.torch._devices import Devices
from elasticdl.torch._point_to_point import PointToPoint

HERE = pathlib.Path(__file__).resolve()
CHECKS = ["operations", "streams", "failure", "programs"]
# Ranks on one GPU: NCCL takes hosts of other names for other hosts.
ONE_GPU = {
    **dict.fromkeys(["NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"], "1"),
    **{"NCCL_MAX_NCHANNELS": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"},
    **{"NCCL_MNNVL_ENABLE": "0", "ELASTICDL_NCCL_SHARED": "1"},
}
TYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
LIMIT = 60.0


class Group(Collectives):
    """A group without PyTorch's, which needs PyTorch 2.15 for one in Python."""

    def __init__(self, store, name, rank, size):
        self._members = rank, size
        self._limit, self._devices = LIMIT, Devices()
        self._ring = _elasticdl.Ring("127.0.0.1")
        store.set(f"{name}/{rank}", self._ring.address)
        addresses = [store.get(f"{name}/{each}").decode() for each in range(size)]
        self._ring.connect(
            name=name, secret=b"secret", rank=rank, addresses=addresses, timeout=LIMIT
        )
        self._point_to_point = PointToPoint(dist.PrefixStore(name, store), rank)

    def rank(self):
        return self._members[0]

    def size(self):
        return self._members[1]


def operations(group, make, dtype):
    """The results of all operations by name, of tensors that `make` puts on a device."""
    rank, size = group.rank(), group.size()

    def part(r, shape=(6, 4)):
        count = shape[0] * shape[1]
        return make((torch.arange(1, count + 1).view(shape) % (r + 2) + r).to(dtype))

    def empty(*shape):
        return make(torch.full(shape, 9).to(dtype))

    def options(kind, **values):
        opts = kind()
        for name, value in values.items():
            setattr(opts, name, value)
        return opts

    found = {}
    kinds = ["SUM", "MAX", "MIN", "PRODUCT"]
    kinds += ["AVG"] if dtype.is_floating_point else ["BAND", "BOR"] * (dtype != torch.bool)
    for kind in ["MAX"] if dtype == torch.bool else kinds:
        opts = options(c10d.AllreduceOptions, reduceOp=getattr(dist.ReduceOp, kind))
        # Contiguous, strided, and empty.
        found[f"all_reduce {kind}"] = several = [part(rank), part(rank)[:, ::2], part(rank)[:0]]
        for tensor in several:
            group.allreduce([tensor], opts).wait()
        found[f"all_reduce_coalesced {kind}"] = several = [part(rank), part(rank).t()]
        group.allreduce_coalesced(several, opts).wait()
        opts = options(c10d.ReduceScatterOptions, reduceOp=getattr(dist.ReduceOp, kind))
        found[f"reduce_scatter {kind}"] = [empty(6, 4), empty(24)]
        first, second = found[f"reduce_scatter {kind}"]
        group.reduce_scatter([first], [[part(rank + to) for to in range(size)]], opts).wait()
        group.reduce_scatter_single(second, part(rank, (6 * size, 4)).view(-1), opts).wait()
        found[f"reduce_scatter_coalesced {kind}"] = several = [empty(6, 4), empty(3, 4)]
        given = [part(rank, (6 * size, 4)), part(rank, (3 * size, 4))]
        group.reduce_scatter_single_coalesced(several, given, opts).wait()
        found[f"reduce {kind}"] = [part(rank)]
        opts = options(c10d.ReduceOptions, reduceOp=getattr(dist.ReduceOp, kind), rootRank=size - 1)
        group.reduce(found[f"reduce {kind}"], opts).wait()
    found["broadcast"] = [part(rank), part(rank).t(), part(rank, (3, 1))]
    for tensor in found["broadcast"]:
        group.broadcast([tensor], options(c10d.BroadcastOptions, rootRank=size - 1)).wait()
    opts = c10d.AllgatherOptions()
    found["all_gather"] = [empty(4, 6).t() for _ in range(size)]
    group.allgather([found["all_gather"]], [part(rank)], opts).wait()
    found["all_gather_single"] = [empty(6 * size, 4)]
    group.all_gather_single(found["all_gather_single"][0], part(rank), opts).wait()
    found["all_gather_coalesced"] = several = [empty(6 * size, 4), empty(4 * size, 6)]
    group.all_gather_single_coalesced(several, [part(rank), part(rank).t()], opts).wait()
    found["gather"] = [empty(6, 4) for _ in range(size)]
    into = [found["gather"]] if rank == 0 else []
    group.gather(into, [part(rank)], options(c10d.GatherOptions, rootRank=0)).wait()
    found["scatter"] = [empty(6, 4)]
    given = [[part(to) for to in range(size)]] if rank == 0 else []
    group.scatter(found["scatter"], given, options(c10d.ScatterOptions, rootRank=0)).wait()
    # Rank r gives each rank `to` `to + 1` rows.
    found["all_to_all_single"] = [empty(size * (rank + 1), 4)]
    given = part(rank, (size * (size + 1) // 2, 4))
    rows = [rank + 1] * size, list(range(1, size + 1))
    opts = c10d.AllToAllOptions()
    group.all_to_all_single(found["all_to_all_single"][0], given, *rows, opts).wait()
    found["all_to_all"] = [empty(6, 4) for _ in range(size)]
    group.alltoall(found["all_to_all"], [part(rank + to) for to in range(size)], opts).wait()
    found["send and recv"] = [empty(6, 4)]
    received = group.recv(found["send and recv"], (rank - 1) % size, 7)
    group.send([part(rank)], (rank + 1) % size, 7)
    received.wait()
    group.barrier(c10d.BarrierOptions()).wait()
    return {name: [tensor.cpu() for tensor in tensors] for name, tensors in found.items()}


def check_operations(group, options):
    faults, count = [], 0
    for name in TYPES:
        dtype = getattr(torch, name)
        expected = operations(group, lambda tensor: tensor, dtype)
        found = operations(group, lambda tensor: tensor.to(options.device), dtype)
        for operation, tensors in expected.items():
            count += len(tensors)
            if not all(map(torch.equal, tensors, found[operation])):
                faults.append(f"{name} {operation}: {found[operation]}, not {tensors}")
    shown = {"compared": count}
    if options.device == "cuda":
        shown["nccl"] = group._ring.has_nccl(group._devices.used()[0]._gpu)
        if shown["nccl"] != (options.transport == "nccl"):
            faults.append(f"NCCL was used: {shown['nccl']}")
    return shown, faults


def check_streams(group, options):
    """On a GPU, whose memory PyTorch gives again at once on the stream where it was freed."""
    if options.device == "cpu":
        return {"left out": "streams are of GPUs"}, []
    rank, size, faults = group.rank(), group.size(), []
    writes, reads = torch.cuda.Stream(), torch.cuda.Stream()
    opts = c10d.AllreduceOptions()
    began = time.perf_counter()
    for turn in range(20):
        expected = float(sum(range(size)) + size * turn)
        for dtype in torch.float32, torch.int64:
            with torch.cuda.stream(writes):
                values = torch.zeros(500_000, dtype=dtype, device=options.device)
                torch.cuda._sleep(20_000_000)
                values += rank + turn
                works = [group.allreduce([values], opts)]
                gathered = torch.zeros(size * 1000, dtype=dtype, device=options.device)
                own = torch.full((1000,), rank, dtype=dtype, device=options.device)
                works.append(group.all_gather_single(gathered, own, c10d.AllgatherOptions()))
                del own
                torch.full((1000,), -1, dtype=dtype, device=options.device)
            for work in works:
                work.wait()
            with torch.cuda.stream(reads):
                # Copied before anything else waits.
                shown = values.max(), values.min(), gathered.view(size, -1).amin(1)
            least, most = float(shown[1]), float(shown[0])
            if least != expected or most != expected:
                faults.append(f"turn {turn}, {dtype}: from {least} to {most}, not {expected}")
            if shown[2].tolist() != list(range(size)):
                faults.append(f"turn {turn}, {dtype}: gathered {shown[2].tolist()}")
    return {"ms_of_a_turn": round((time.perf_counter() - began) / 20 * 1e3, 2)}, faults


def check_failure(group, options):
    values = torch.full((1_000_000,), float(group.rank()), device=options.device)
    if group.rank() == group.size() - 1:
        group._ring.abort()
        return {}, []
    began = time.perf_counter()
    try:
        for turn in range(3):
            before = values.clone()
            group.allreduce([values], c10d.AllreduceOptions()).wait()
    except RuntimeError as error:
        shown = {"error": str(error)[:200], "s": round(time.perf_counter() - began, 2)}
        return shown, [] if torch.equal(values, before) else ["the tensor of a failed sum changed"]
    return {}, ["no operation failed"]


def check_programs(store, options):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        return {"left out": f"PyTorch {torch.__version__} has no backends in Python"}, []
    import elasticdl.torch.distributed  # noqa: F401
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, size, device = options.rank, options.ranks, options.device
    limit = datetime.timedelta(seconds=LIMIT)
    dist.init_process_group("elasticdl", store=store, rank=rank, world_size=size, timeout=limit)
    mesh = dist.init_device_mesh(device, (size,))

    def network():
        torch.manual_seed(1)
        layers = torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)
        return torch.nn.Sequential(*layers).to(device)

    def train(net, mine):
        torch.manual_seed(2)
        x, y = torch.randn(5, 8 * size, 32).to(device), torch.randn(5, 8 * size, 8).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            (net(x[step, mine]) - y[step, mine]).square().mean().backward()
            optimizer.step()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        return torch.cat([p.detach().reshape(-1).cpu() for p in whole])

    mine, faults = slice(8 * rank, 8 * (rank + 1)), []
    right = train(network(), slice(None))
    ddp = train(torch.nn.parallel.DistributedDataParallel(network()), mine)
    sharded = network()
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    errors = {"DDP": ddp - right, "FSDP2": train(sharded, mine) - right}
    rows = torch.arange(8 * size * 3.0).view(8 * size, 3).to(device)
    errors["DTensor"] = (distribute_tensor(rows, mesh, [Shard(0)]).full_tensor() - rows).cpu()
    errors = {name: float(error.abs().max()) for name, error in errors.items()}
    faults += [f"{name} differs by {error}" for name, error in errors.items() if not error < 1e-5]
    dist.destroy_process_group()
    return errors, faults


def work(options):
    """One rank: its results go to a file."""
    if options.device == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(str(options.folder / "store"), options.ranks)
    results = {}
    for name in options.only.split(","):
        if name == "programs":
            act = lambda: check_programs(dist.PrefixStore(name, store), options)
        else:
            act = lambda: globals()[f"check_{name}"](
                Group(store, name, options.rank, options.ranks), options
            )
        began = time.monotonic()
        try:
            shown, faults = act()
        except Exception as error:
            shown, faults = {}, [f"{type(error).__name__}: {error}"]
        shown["took"] = f"{time.monotonic() - began:.1f} s"
        results[name] = {"faults": [fault[:500] for fault in faults[:5]], **shown}
        (options.folder / f"result-{options.rank}").write_text(json.dumps(results))
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(CHECKS), help=f"default: {','.join(CHECKS)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, help="seconds over one transport")
    parser.add_argument("--transport", default="host,nccl", help="default: host,nccl")
    parser.add_argument("--rank", type=int, default=os.environ.get("RANK"))
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    options = parser.parse_args()
    if options.folder:
        return work(options)
    bad, results = [], {}
    for transport in options.transport.split(","):
        results[transport], faults = run(options, transport)
        bad += [f"{transport}: {fault}" for fault in faults]
        if options.json:
            options.json.write_text(json.dumps({"faults": bad, "ranks": results}, indent=1))
    print(f"PyTorch {torch.__version__}: {'; '.join(bad) or 'all ok'}")
    return int(bool(bad))


def run(options, transport):
    """The results of all ranks, and their faults."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, HERE, *sys.argv[1:], "--transport", transport]
        command += ["--ranks", str(options.ranks)]
        chosen = ONE_GPU if transport == "nccl" else {"ELASTICDL_NCCL": "off"}
        running = []
        for rank in range(options.ranks):
            environment = {**os.environ, **chosen, "NCCL_HOSTID": f"rank-{rank}"}
            command_of_rank = [*command, "--rank", str(rank), folder]
            running.append(subprocess.Popen(command_of_rank, env=environment))
        deadline, codes = time.monotonic() + options.limit, []
        for rank in running:
            try:
                codes.append(rank.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                rank.kill()
                codes.append(f"no end in {options.limit} s")
        paths = [pathlib.Path(folder) / f"result-{rank}" for rank in range(options.ranks)]
        results = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    bad = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code != 0]
    for name in options.only.split(","):
        for rank, result in enumerate(results):
            shown = dict(result.get(name, {"faults": ["not run"]}))
            faults = shown.pop("faults")
            bad += faults
            print(f"{transport} {name}, rank {rank}: {'; '.join(faults) or 'ok'} {shown}")
    return results, bad


if __name__ == "__main__":
    sys.exit(main())
