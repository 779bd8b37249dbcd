"""The comparison with plain PyTorch, DDP and torchrun; `.bench/pytorch` runs it."""

import argparse
import contextlib
import difflib
import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ELASTICDL = os.environ["ELASTICDL"]
RECORDS_PER_STEP = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="steps of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements; the median counts")
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"], choices=["mlp", "cnn"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--records", type=int, default=20000, help="records of each run with kills")
    parser.add_argument("--kill-every", type=float, nargs="+", default=[0, 5, 2], help="seconds")
    parser.add_argument("--only", choices=["lines", "rates", "kills"])
    options = parser.parse_args()
    parts = {"lines": print_lines, "rates": print_rates, "kills": print_kills}
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
                "elasticdl": lambda: elastic(count, ["elastic.py", *arguments]),
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


def print_kills(options):
    """Goodput, and records lost and repeated."""
    count = max(options.processes)
    systems = ["elasticdl", "torchrun"]
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed, and left out (pip install torchft)")
    else:
        systems.append("torchft")
    print(f"{options.records} records, {count} workers, a worker killed every so often")
    print("  kill every  with       kills  seconds  goodput  lost  repeated")
    for every in options.kill_every:
        for name in systems:
            with tempfile.TemporaryDirectory() as folder:
                kills, seconds, result = run_with_kills(name, count, options.records, every, folder)
            ideal = options.records * 0.002 / count
            lost, repeated = result or ("never", "ended")
            print(
                f"  {every or '-':>10}  {name:9}  {kills:5}  {seconds:7.1f}"
                f"  {100 * ideal / seconds:6.1f}%  {lost:>4}  {repeated:>8}",
                flush=True,
            )


def run_with_kills(name, count, records, every, folder):
    path = f"{folder}/counts"
    if name == "elasticdl":
        command = elastic(count, ["count_elastic.py", str(records), path], folder)
    elif name == "torchft":
        program = ["count_torchft.py", str(records), path, str(RECORDS_PER_STEP)]
        command = [sys.executable, HERE / "torchft_replicas.py", str(count), *program]
    else:
        program = ["count_torchrun.py", str(records), path, str(RECORDS_PER_STEP), "10"]
        command = torchrun(count, program, "--max-restarts", "1000")
    started = time.monotonic()
    with open(f"{folder}/log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, cwd=HERE)
        try:
            kills, last = 0, started
            while job.poll() is None and time.monotonic() < started + DEADLINE:
                time.sleep(0.05)
                if every and time.monotonic() > last + every:
                    last = time.monotonic()
                    kills += kill_one(job.pid, f"count_{name.replace('dl', '')}.py")
        finally:
            job.kill()
            job.wait()
    seconds = time.monotonic() - started
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        lost, repeated, _ = file.read().split()
        return kills, seconds, (lost, repeated)
    return kills, seconds, None


def kill_one(parent, program):
    """Kills the process of the program that has run longest, below a process."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")
            if words[1:2] and any(word.endswith(program) for word in words[1:3]):
                found.append((descends(int(folder.name), parent), int(folder.name)))
    pids = sorted(pid for is_ours, pid in found if is_ours)
    if len(pids) < 2:
        return 0
    os.kill(pids[0], signal.SIGKILL)
    return 1


def descends(pid, parent):
    while pid > 1:
        if pid == parent:
            return True
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rsplit(")", 1)[1].split()[1])
    return False


def elastic(count, program, folder=None):
    return [
        *(ELASTICDL, "train", "--local", "--num-workers", str(count), "--min-workers", str(count)),
        *(("--job-dir", f"{folder}/job") if folder else ()),
        *("--max-workers", str(count), "--global-batch-size", str(RECORDS_PER_STEP)),
        *("--", sys.executable, HERE / program[0], *program[1:]),
    ]


def torchrun(count, program, *options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)),
        *("--master-addr", "127.0.0.1", "--master-port", str(port), *options),
        *(HERE / program[0], *program[1:]),
    ]


def rate_of(command):
    """The rate that a worker prints. All workers take the same steps."""
    options = {"capture_output": True, "text": True, "check": False, "cwd": HERE}
    ended = subprocess.run(command, timeout=DEADLINE, **options)
    text = ended.stdout + ended.stderr
    rates = [line.split("rate ")[1] for line in text.splitlines() if "rate " in line]
    if ended.returncode or not rates:
        raise SystemExit(f"{command} failed:\n{text[-3000:]}")
    return float(rates[0].split()[0])


def median(values):
    return sorted(values)[len(values) // 2] if values else float("nan")


DEADLINE = 600

if __name__ == "__main__":
    main()
