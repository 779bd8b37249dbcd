"""Resident memory of a worker for each parameter, with and without ``--shard-optimizer``:
``memory.py ELASTICDL [WORKERS [PARAMETERS]]``, with the package in ``PYTHONPATH``.

What the size of the model does not change drops out. It is measured in one of the last steps, by
the worker that is first there.
"""

import pathlib
import subprocess
import sys
import tempfile

STEPS, WORKERS, PARAMETERS = 64, 4, 16 << 20


def train(path, parameters):
    """The program of a worker."""
    import torch

    import elasticdl.torch as et

    torch.set_num_threads(1)
    net = torch.nn.ParameterList([torch.ones(parameters // 16) for _ in range(16)])
    job = et.join()
    job.model(net)
    opt = job.optimizer(torch.optim.AdamW(net.parameters(), lr=1e-3))
    is_measured = False
    for _ in job.sampler(STEPS * 16, micro_batch=16):
        sum(each.sum() for each in net).backward()
        opt.step()
        if job.step >= STEPS - 4 and not is_measured:
            status = pathlib.Path("/proc/self/status").read_text()
            lines = [line.split() for line in status.splitlines()]
            kib = next(words[1] for words in lines if words[0] == "RssAnon:")
            with open(path, "a") as file:
                file.write(f"{kib}\n")
            is_measured = True


def measured(elasticdl, workers, parameters, options):
    """Resident bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kib"
        command = [
            *(elasticdl, "train", "--local", "--quiet", "--job-dir", f"{folder}/job"),
            *("--num-workers", str(workers), "--global-batch-size", "16"),
            *("--checkpoint-dir", "none", *options),
            *("--", sys.executable, __file__, "--worker", str(path), str(parameters)),
        ]
        subprocess.run(command, check=True)
        return int(path.read_text().split()[0]) << 10


def main(elasticdl, workers=WORKERS, parameters=PARAMETERS):
    workers, parameters = int(workers), int(parameters)
    for options in [], ["--shard-optimizer"]:
        sizes = parameters // 8, parameters
        small, large = [measured(elasticdl, workers, size, options) for size in sizes]
        each = (large - small) / (parameters - parameters // 8)
        mode = " ".join(options) or "all of the state on each worker"
        print(f"AdamW, {workers} workers, {mode}: {each:.1f} bytes per parameter")


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        train(sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:])
