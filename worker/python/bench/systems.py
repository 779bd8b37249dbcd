"""How a program is started with elasticdl, torchrun, torchft, Ray Train, JAX and TorchRec."""

import os
import pathlib
import signal
import socket
import sys

from progress import RECORDS_PER_STEP

HERE = pathlib.Path(__file__).parent
ELASTICDL = os.environ["ELASTICDL"]


def elastic(count, program, *options):
    """The command of a job on this machine."""
    return [
        *(ELASTICDL, "train", "--local", "--num-workers", str(count), *options),
        *("--global-batch-size", str(RECORDS_PER_STEP)),
        *("--", sys.executable, HERE / program[0], *program[1:]),
    ]


def torchrun(count, program, *options):
    """The command of a group of a fixed size on this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port()), *options),
        *(HERE / program[0], *program[1:]),
    ]


def free_port():
    """A port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Elastic:
    """A job of elasticdl, and a checkpoint every 10 steps. With all workers, each computes a step
    in one micro-batch, as those of the others do."""

    program = "count_elastic.py"
    spares = 0

    def __init__(self, count, first, arguments, folder):
        self.count, self.first = count, first
        self.arguments = [*arguments, str(RECORDS_PER_STEP // count)]
        self.folder = f"{folder}/job"

    def commands(self):
        return [elastic(self.first, [self.program, *self.arguments], *self.options())]

    def options(self):
        options = ["--max-workers", str(self.count), "--job-dir", self.folder]
        return [*options, "--spares", str(self.spares), "--checkpoint-every", "10"]

    def join(self, _):
        return [ELASTICDL, "scale", self.folder, "--num-workers", str(self.count)]


class ElasticWithSpare(Elastic):
    """A job that keeps a worker more, which takes the place of a lost one."""

    spares = 1


class ElasticWithTables(Elastic):
    """A job whose model has embedding tables. No worker has all of their rows, so the counts are
    read from the exported model."""

    program = "count_elastic_tables.py"

    def commands(self):
        (job,) = super().commands()
        records, path, _ = self.arguments
        return [[sys.executable, HERE / "count_exported.py", self.export(), records, path, *job]]

    def options(self):
        return [*super().options(), "--export", self.export()]

    def export(self):
        return f"{self.folder}.safetensors"


class Torchrun:
    """An agent of torchrun for each worker, as on one node each, and a checkpoint every 10 steps.

    An operation of gloo that takes 10 s is an error, which ends a hang. With the agent's store, as
    is the default, workers that start again often try the addresses of those before, for minutes.
    """

    program = "count_torchrun.py"

    def __init__(self, count, first, arguments, folder):
        del folder
        self.first = first
        self.command = [
            *(*OWN_STORE, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"),
            *("--nnodes", f"1:{count}", "--rdzv-backend", "c10d", "--rdzv-id", "count"),
            *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", "1000"),
            # When the first workers are there, a rendezvous waits for more for as long.
            *("--rdzv-conf", "last_call_timeout=2"),
            *(HERE / self.program, *arguments, str(RECORDS_PER_STEP), "10"),
        ]

    def commands(self):
        return [self.command] * self.first

    def join(self, _):
        return self.command


class TorchrunOnOneNode:
    """One agent of torchrun with all workers, which start again after the loss of one, and a
    checkpoint every 10 steps."""

    program = Torchrun.program

    def __init__(self, count, first, arguments, folder):
        del first, folder
        self.command = [
            *(*OWN_STORE, sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(count), "--max-restarts", "1000"),
            *(HERE / self.program, *arguments, str(RECORDS_PER_STEP), "10"),
        ]

    def commands(self):
        return [self.command]


class Torchrec(TorchrunOnOneNode):
    """The same for a model with embedding tables, which TorchRec spreads over the workers."""

    program = "count_torchrec.py"


class Torchft:
    """A replica group of torchft for each worker, with the heartbeat timeout at 1 s."""

    program = "count_torchft.py"

    def __init__(self, count, first, arguments, folder):
        del folder
        self.command = [
            *(sys.executable, HERE / "torchft_replicas.py", str(count), str(first)),
            *(HERE / self.program, *arguments, str(RECORDS_PER_STEP)),
        ]

    def commands(self):
        return [self.command]

    def join(self, pid):
        os.kill(pid, signal.SIGUSR1)


class Ray:
    """An actor of Ray for each worker, and a checkpoint every 100 steps: a report takes 1.2 s."""

    program = "ray::RayTrainWorker"

    def __init__(self, count, first, arguments, folder):
        del first
        words = [*arguments, str(RECORDS_PER_STEP), "100", str(count), folder]
        self.command = [sys.executable, HERE / "count_ray.py", *words]

    def commands(self):
        return [self.command]


class Jax:
    """A process of JAX for each worker, and a checkpoint every 10 steps. All start again after the
    loss of one."""

    program = "worker-of-jax"

    def __init__(self, count, first, arguments, folder):
        del first, folder
        words = [*arguments, str(RECORDS_PER_STEP), "10", str(count)]
        self.command = [sys.executable, HERE / "count_jax.py", *words]

    def commands(self):
        return [self.command]


OWN_STORE = "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
SYSTEMS = {
    **{"elasticdl": Elastic, "elasticdl-spare": ElasticWithSpare},
    **{"torchrun": Torchrun, "torchrun-node": TorchrunOnOneNode},
    **{"torchft": Torchft, "ray": Ray, "jax": Jax},
    **{"elasticdl-tables": ElasticWithTables, "torchrec": Torchrec},
}
