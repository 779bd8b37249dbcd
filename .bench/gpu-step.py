#!/usr/bin/env python3
"""Times steps of PyTorch on one GPU: `gpu-step.py [--json FILE] [--device cpu]`.

A job of one worker beside the plain loop, in turn: a network of about 2 and of about 102 million
parameters, AdamW, one micro-batch a step. Prints the median milliseconds of a step of each. Needs
PyTorch, the package on PYTHONPATH, and the command `elasticdl` in PATH or ELASTICDL.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch

HERE = pathlib.Path(__file__).resolve()
# Width and number of the layers.
SIZES = {"2 M": (512, 8), "102 M": (3200, 10)}
RECORDS, WARM_UP, STEPS, ROUNDS = 64, 20, 100, 2


def network(size, device):
    width, layers = SIZES[size]
    torch.manual_seed(1)
    linear = [torch.nn.Linear(width, width, device=device) for _ in range(layers)]
    net = torch.nn.Sequential(*[part for one in linear for part in (one, torch.nn.Tanh())])
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4)


def train(size, device, out):
    """One of both loops, in this process: milliseconds of a step, to the file `out`."""
    net, inner = network(size, device)
    x = torch.randn(RECORDS, SIZES[size][0], device=device)
    if "ELASTICDL_LAUNCH" in os.environ:
        import elasticdl.torch as et

        job = et.join()
        job.model(net)
        opt = job.optimizer(inner)
        sampler = job.sampler(RECORDS * (WARM_UP + STEPS + 1), micro_batch=RECORDS)
        batches = (batch for _ in job.epochs() for batch in sampler)
        step = opt.step
    else:
        opt, step = inner, lambda loss: inner.step()
        batches = range(WARM_UP + STEPS + 1)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for number, _ in enumerate(batches):
        if number == WARM_UP:
            wait()
            began = time.perf_counter()
        elif number == WARM_UP + STEPS:
            # Not the job's end, with its checkpoint.
            wait()
            out.write_text(str((time.perf_counter() - began) / STEPS * 1e3))
        opt.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        step(loss)


def run(size, device, kind, folder):
    out = folder / "ms"
    program = [sys.executable, HERE, "--device", device, "--train", size, out]
    if kind == "job":
        elasticdl = os.environ.get("ELASTICDL", "elasticdl")
        program = [
            *[elasticdl, "train", "--local", "--quiet", "--replace", "--job-dir", folder / "job"],
            *["--num-workers", "1", "--max-workers", "1", "--num-epochs", "1"],
            *["--global-batch-size", str(RECORDS), "--", *program],
        ]
    subprocess.run(program, check=True)
    return float(out.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", choices=SIZES, help="one of the sizes")
    parser.add_argument("--train", choices=SIZES)
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    options = parser.parse_args()
    if options.train:
        return train(options.train, options.device, options.out)
    figures = {}
    for size in [options.only] if options.only else SIZES:
        times = {"plain": [], "job": []}
        for _ in range(ROUNDS):
            for kind, taken in times.items():
                with tempfile.TemporaryDirectory() as folder:
                    taken.append(run(size, options.device, kind, pathlib.Path(folder)))
        figures[size] = {kind: statistics.median(taken) for kind, taken in times.items()}
        print(size, {kind: f"{ms:.2f} ms" for kind, ms in figures[size].items()}, flush=True)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
