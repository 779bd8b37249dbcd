"""The churn league: the same counting program with each system, while its workers are killed.

Each cell is a system, an interval between kills and a number of workers. FILE keeps the cells that
are done, so that the league can run over several days; another build belongs to another file.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from faults import Run
from progress import MILLISECONDS_PER_RECORD
from systems import ELASTICDL, SYSTEMS


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(".bench/league", description=__doc__, formatter_class=form)
    parser.add_argument("--json", required=True, metavar="FILE", help="the cells that are done")
    parser.add_argument("--plot", metavar="FILE", help="draw what the file has, as SVG or PNG")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    kills = {"type": float, "nargs": "*", "default": [0, 60, 30, 10, 5, 2]}
    parser.add_argument("--kill-every", **kills, help="seconds; 0: never")
    help = "what a run takes without faults; it is ended after three times as long"
    parser.add_argument("--seconds", type=float, default=60.0, help=help)
    options = parser.parse_args()
    path = pathlib.Path(options.json)
    cells = json.loads(path.read_text()) if path.exists() else []
    systems = [name for name in options.systems if is_installed(name)]
    wanted = [
        {"system": name, "workers": workers, "kill_every": every, "seconds": options.seconds}
        for every in options.kill_every
        for workers in options.workers
        for name in systems
    ]
    for cell in wanted:
        if not any(cell.items() <= done.items() for done in cells):
            cells.append(cell | measure(**cell))
            write(path, cells)
    print_table(cells)
    if options.plot:
        plot(cells, options.plot)


def is_installed(name):
    """Whether a system can be measured here."""
    modules = {"torchft": "torchft", "ray": "ray.train", "jax": "jax", "torchrec": "torchrec"}
    module = modules.get(name, "torch")
    found = importlib.util.find_spec(module.split(".")[0]) is not None
    if not found:
        print(f"{name} is not installed, and left out", file=sys.stderr)
    return found


def measure(system, workers, kill_every, seconds):
    """A run of this cell."""
    records = int(workers * seconds * 1000 / MILLISECONDS_PER_RECORD)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(system, workers, records, folder)
        kills = run.kill_until_done(kill_every, 3 * seconds)
        pauses, counts = run.pauses_after(kills), run.counts()
        goodput = run.goodput()
    cell = {
        "version": version(system),
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        "records": records,
        "kills": len(kills),
        "goodput": goodput,
        "pause_p50_ms": quantile(pauses, 0.5),
        "pause_p99_ms": quantile(pauses, 0.99),
        "lost": counts and counts[0],
        "repeated": counts and counts[1],
    }
    print(f"{system}, {workers} workers, kill every {kill_every:g} s: {cell}", flush=True)
    return cell


def version(system):
    """What was measured."""
    if system.startswith("elasticdl"):
        command = [ELASTICDL, "--version"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1]
    return importlib.metadata.version("torch" if system.startswith("torchrun") else system)


def quantile(values, part):
    """In milliseconds, or None without values."""
    ranked = sorted(values)
    value = ranked[min(int(len(ranked) * part), len(ranked) - 1)] if ranked else None
    return value if value is None else round(1000 * value)


def write(path, cells):
    """Replaces the file as a whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(cells, indent=1) + "\n")
    new.replace(path)


def print_table(cells):
    """All cells, those that compete with each other in a row."""
    heads = "workers", "kill every", "system", "kills", "goodput", "pause p50, p99, ms"
    print("|", " | ".join([*heads, "lost", "repeated"]), "|")
    print("|---|---|---|---|---|---|---|---|")
    order = list(SYSTEMS)
    for cell in sorted(cells, key=lambda it: (it["workers"], -rank(it), order.index(it["system"]))):
        every = f"{cell['kill_every']:g} s" if cell["kill_every"] else "never"
        pauses = "-" if cell["pause_p50_ms"] is None else "{pause_p50_ms}, {pause_p99_ms}"
        lost = "unfinished" if cell["lost"] is None else cell["lost"]
        repeated = "-" if cell["repeated"] is None else cell["repeated"]
        print(
            f"| {cell['workers']} | {every} | {cell['system']} {cell['version']} | {cell['kills']}"
            f" | {100 * cell['goodput']:.1f} % | {pauses.format(**cell)} | {lost} | {repeated} |"
        )


def rank(cell):
    """Cells without kills come first."""
    return cell["kill_every"] or float("inf")


def plot(cells, path):
    """Goodput over the kill interval: a line for each system, a panel for each group size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({cell["workers"] for cell in cells})
    size = 4.5 * len(counts) + 1.5, 3.2
    figure, panels = pyplot.subplots(1, len(counts), figsize=size, sharey=True, layout="constrained")
    for workers, panel in zip(counts, [panels] if len(counts) == 1 else panels):
        for name in SYSTEMS:
            line = [c for c in cells if c["system"] == name and c["workers"] == workers]
            line = sorted((cell for cell in line if cell["kill_every"]), key=rank)
            values = [100 * cell["goodput"] for cell in line]
            panel.plot([cell["kill_every"] for cell in line], values, "o-", label=name)
        panel.set(xscale="log", xlabel="a worker is killed every … s", ylim=(0, 102))
        panel.set_title(f"{workers} workers")
        intervals = sorted({cell["kill_every"] for cell in cells if cell["kill_every"]})
        panel.set_xticks(intervals, [f"{every:g}" for every in intervals], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("goodput, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path)


if __name__ == "__main__":
    main()
