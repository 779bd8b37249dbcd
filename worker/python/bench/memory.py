"""Resident memory of a worker for each parameter, with and without ``--shard-optimizer``:
``memory.py ELASTICDL [WORKERS [PARAMETERS]]``, with the package in ``PYTHONPATH``.

What the size of the model does not change drops out. It is measured in one of the last steps, by
the worker that is first there.

``memory.py peaks ELASTICDL [KIND...]``: the peak of the memory of the first steps of a network of
50.4 M parameters, of a plain loop, of a worker that trains alone, and of the largest of two workers
without and with ``--shard-optimizer``. Kinds of optimizers: sgd, momentum, adam, adamw.
"""

import pathlib
import resource
import subprocess
import sys
import tempfile

STEPS, WORKERS, PARAMETERS = 64, 4, 16 << 20
FIRST_STEPS = 6


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


def begin(path, kind, is_plain):
    """The program whose peak is measured."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [(torch.nn.Linear(2048, 2048), torch.nn.ReLU()) for _ in range(12)]
    net = torch.nn.Sequential(*(module for layer in layers for module in layer))
    make, settings = {
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
    }[kind]
    opt = make(net.parameters(), lr=1e-3, **settings)
    draws = range(FIRST_STEPS)
    if not is_plain:
        import elasticdl.torch as et

        job = et.join()
        net, opt = job.model(net), job.optimizer(opt)
        draws = job.sampler(FIRST_STEPS * 16, micro_batch=16)
    x = torch.randn(16, 2048)
    for drawn in draws:
        loss = net(x if is_plain else x[: len(drawn)]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step(*[] if is_plain else [loss])
    with open(path, "a") as file:
        file.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n")


def print_peaks(elasticdl, *kinds):
    print("peak, MiB    plain   alone         2 workers     2, --shard-optimizer")
    for kind in kinds or ("sgd", "momentum", "adam", "adamw"):
        alone = [sys.executable, __file__, "--peak", kind]
        peaks = [peak(alone, "plain"), peak(alone, "elasticdl")]
        for options in [], ["--shard-optimizer"]:
            with tempfile.TemporaryDirectory() as folder:
                job = [
                    *(elasticdl, "train", "--local", "--quiet", "--job-dir", f"{folder}/job"),
                    *("--num-workers", "2", "--min-workers", "2", "--global-batch-size", "16"),
                    *("--checkpoint-dir", "none", *options, "--", *alone),
                ]
                peaks.append(peak(job, "elasticdl"))
        plain = peaks[0]
        ratios = "".join(f"   {each:5.0f} ({each / plain:.2f})" for each in peaks[1:])
        print(f"{kind:10} {plain:7.0f}{ratios}", flush=True)


def peak(command, mode):
    """MiB, of the largest process."""
    with tempfile.NamedTemporaryFile("r") as file:
        subprocess.run([*command, mode, file.name], check=True)
        return max(int(line) for line in file) / 1024


def main(elasticdl, workers=WORKERS, parameters=PARAMETERS):
    workers, parameters = int(workers), int(parameters)
    for options in [], ["--shard-optimizer"]:
        sizes = parameters // 8, parameters
        small, large = [measured(elasticdl, workers, size, options) for size in sizes]
        each = (large - small) / (parameters - parameters // 8)
        mode = " ".join(options) or "all of the state on each worker"
        print(f"AdamW, {workers} workers, {mode}: {each:.1f} bytes per parameter")


if __name__ == "__main__":
    if sys.argv[1] == "--peak":
        begin(sys.argv[4], sys.argv[2], sys.argv[3] == "plain")
    elif sys.argv[1] == "peaks":
        print_peaks(*sys.argv[2:])
    elif sys.argv[1] == "--worker":
        train(sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:])
