"""The comparison with plain PyTorch, DDP and torchrun; `.bench/pytorch` runs it."""

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import print_pauses
from systems import HERE, elastic, torchrun
from workload import RECORDS_PER_STEP


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="steps of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements; the median counts")
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"], choices=["mlp", "cnn"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="with faults")
    parser.add_argument("--only", choices=["lines", "rates", "starts", "pauses"])
    options = parser.parse_args()
    parts = {"lines": print_lines, "rates": print_rates, "starts": print_starts}
    parts["pauses"] = print_pauses
    for name, act in parts.items():
        if options.only in (None, name):
            act(options)


def print_lines(_):
    """How many lines of the plain program change."""
    plain = (HERE / "plain.py").read_text().splitlines()[1:]
    print("lines changed or added in a plain program of", len(plain), "lines")
    for name in "elastic.py", "ddp.py":
        other = (HERE / name).read_text().splitlines()[1:]
        added = [line for line in difflib.ndiff(plain, other) if line.startswith("+ ")]
        # What the comparison alone needs.
        added = [line for line in added if line[2:].strip() and "elasticdl.torch.dist" not in line]
        print(f"  {name:12} {len(added)}")


def print_rates(options):
    """Steps per second. The rounds alternate between the programs, and ratios are of one round."""
    print(f"steps/s, {RECORDS_PER_STEP} records per step, medians of {options.rounds} rounds")
    print("  model  processes    plain  elasticdl  DDP gloo  DDP elasticdl  ratios to DDP gloo")
    for model in options.models:
        for count in options.processes:
            arguments = [model, str(options.steps)]
            commands = {
                "elasticdl": lambda: elastic(
                    count, ["elastic.py", *arguments], "--min-workers", str(count)
                ),
                "gloo": lambda: torchrun(count, ["ddp.py", *arguments, "gloo"]),
                "ddp": lambda: torchrun(count, ["ddp.py", *arguments, "elasticdl"]),
            }
            if count == 1:
                commands["plain"] = lambda: [sys.executable, HERE / "plain.py", *arguments]
            rates = {name: [] for name in (*commands, "plain")}
            for at in range(options.rounds):
                names = list(commands)
                # None is always the first one.
                for name in names[at % len(names) :] + names[: at % len(names)]:
                    rates[name].append(rate_of(commands[name]()))
            ratios = [
                median([a / b for a, b in zip(rates[name], rates["gloo"], strict=True)])
                for name in ("elasticdl", "ddp")
            ]
            print(
                f"  {model:5}  {count:9}  {median(rates['plain']):7.2f}"
                f"  {median(rates['elasticdl']):9.2f}  {median(rates['gloo']):8.2f}"
                f"  {median(rates['ddp']):13.2f}  {ratios[0]:.2f} and {ratios[1]:.2f}",
                flush=True,
            )


def print_starts(options):
    """Memory and steps of a model of 50 M parameters with AdamW, and when the first step ends.

    One process, but for the start of four workers, which is beside that of one.
    """
    print(f"starts and averages, medians of {options.rounds} rounds")
    print("  program           s per step   peak, MiB   first step after, s")
    rows = {mode: (1, mode) for mode in ("plain", "elastic", "average")}
    rows |= {"elastic, 4 workers": (4, "elastic")}
    taken = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, (count, mode) in rows.items():
            arguments = ["start.py", "large", str(options.steps), mode]
            command = [sys.executable, HERE / arguments[0], *arguments[1:]]
            if count > 1:
                command = elastic(count, arguments, "--min-workers", str(count))
            taken[name].append(figures_of(command))
    for name, rounds in taken.items():
        per_step, peak, first = (median(column) for column in zip(*rounds, strict=True))
        print(f"  {name:18} {per_step:9.3f} {peak:11.0f} {first:20.1f}", flush=True)


def rate_of(command):
    """The rate that the programs write to a file. All take the same steps."""
    return figures_of(command)[0]


def figures_of(command):
    """The figures that the first program to end writes to a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rate")
        options = {"capture_output": True, "text": True, "check": False, "cwd": HERE}
        options["env"] = {**os.environ, "RATE_FILE": str(path), "START": str(time.time())}
        ended = subprocess.run(command, timeout=DEADLINE, **options)
        if ended.returncode or not path.exists():
            raise SystemExit(f"{command} failed:\n{(ended.stdout + ended.stderr)[-3000:]}")
        return [float(word) for word in path.read_text().splitlines()[0].split()]


def median(values):
    return sorted(values)[len(values) // 2] if values else float("nan")


DEADLINE = 600

if __name__ == "__main__":
    main()
