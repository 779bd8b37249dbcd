"""all_reduce of torch.distributed, as a baseline of the GPU drill.

baseline.py RANK WORLD FILE cuda|cpu SECONDS BYTES...: one process per GPU, which meet in FILE. For
each size, rank 0 prints a line of JSON: the slowest rank's median time. The time of a sum ends when
its result is in memory, as that of the drill's own sums does.
"""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist


def main(rank, world, file, kind, seconds, *sizes):
    rank, world, seconds = int(rank), int(world), float(seconds)
    is_on_gpu = kind == "cuda"
    device = torch.device("cuda", rank) if is_on_gpu else torch.device("cpu")
    if is_on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if is_on_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)

    def slowest(value):
        value = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()

    def time_of(values):
        dist.barrier()
        if is_on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        dist.all_reduce(values)
        if is_on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    for size in map(int, sizes):
        # Sums of zeros stay zeros.
        values = torch.zeros(size // 4, device=device)
        once = slowest(min(time_of(values) for _ in range(3)))
        count = int(min(max(seconds / max(once, 1e-6), 3), 300))
        median = slowest(statistics.median(time_of(values) for _ in range(count)))
        values.fill_(1.0)
        dist.all_reduce(values)
        if not bool((values == world).all()):
            raise RuntimeError(f"a sum of {world} ones of each rank is wrong")
        if rank == 0:
            print(json.dumps({"bytes": size, "s": median}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
