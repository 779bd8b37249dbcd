"""Counts records under kills, with JAX and a checkpoint every few steps.

Arguments: records, file, records of a step, steps between checkpoints, workers. A group of JAX has
a fixed size and ends with its first lost process, so all are started again, as a job controller
does.
"""

import os
import subprocess
import sys
import time

records, path, batch, every, size = int(sys.argv[-5]), sys.argv[-4], *map(int, sys.argv[-3:])


def supervise():
    """Starts all workers until they have counted everything."""
    from systems import free_port

    workers, ended = [], {None}
    while ended != {0}:
        if None not in ended or len(ended) > 1:
            for worker in workers:
                worker.kill()
                worker.wait()
            command = [sys.executable, __file__, WORKER, str(free_port())]
            ranks = map(str, range(size))
            workers = [subprocess.Popen([*command, rank, *sys.argv[1:]]) for rank in ranks]
        time.sleep(0.02)
        ended = {worker.poll() for worker in workers}


def work(port, rank):
    """A process of the group."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from progress import MILLISECONDS_PER_RECORD, log_step

    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank, heartbeat_timeout_seconds=10)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    on_all, divided = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    # The last step is filled up with a record of no meaning.
    order = np.random.default_rng(0).permutation(records)
    order = np.concatenate([order, np.full(-records % batch, records)])
    share, start, counts = batch // size, 0, np.zeros(records + 1, np.float32)
    if os.path.exists(f"{path}.checkpoint.npz"):
        saved = np.load(f"{path}.checkpoint.npz")
        start, counts = int(saved["step"]), saved["counts"]
    counts = jax.device_put(counts, on_all)

    def apply(counts, indices):
        gradient = jax.grad(lambda counts: -counts[indices].sum())(counts)
        return counts - gradient

    apply = jax.jit(apply, in_shardings=(on_all, divided), out_shardings=on_all)
    for step in range(start, len(order) // batch):
        own = order[step * batch + rank * share :][:share]
        # What computing a record takes.
        time.sleep(share * MILLISECONDS_PER_RECORD / 1000)
        counts = apply(counts, jax.make_array_from_process_local_data(divided, own))
        counts.block_until_ready()
        log_step(path, step + 1, size)
        if (step + 1) % every == 0 and rank == 0:
            np.savez(f"{path}.new.npz", step=step + 1, counts=counts)
            os.replace(f"{path}.new.npz", f"{path}.checkpoint.npz")
    if rank == 0:
        np.asarray(counts)[:records].tofile(f"{path}.new")
        os.replace(f"{path}.new", path)


WORKER = "worker-of-jax"
if sys.argv[1] == WORKER:
    work(sys.argv[2], int(sys.argv[3]))
else:
    supervise()
