"""Programs in the style of those that people have, beside the same with a patch for elasticdl.

``.bench/ports`` runs it. Each program runs as it is, and then, with its patch, in a job of three
workers of which some are killed. The table says how many lines the patch removes and adds, what
both print last, and what the job's ledger says about its records. With ``--lines`` nothing runs,
and the table is that of the package's README.
"""

import argparse
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

from jobs import RunningJob

PORTS = pathlib.Path(__file__).parent / "ports"
# Records of a step, and epochs, as in the programs.
PROGRAMS = {
    **{"mnist": (64, 3), "nanogpt": (32, 1), "word_lm": (32, 4), "dcgan": (64, 3)},
    **{"hf_trainer": (32, 4), "lightning_fit": (64, 4), "accelerate_loop": (64, 4)},
}
# What those need that are not of PyTorch alone; .ci/python installs it.
PACKAGES = {
    "hf_trainer": "transformers",
    "lightning_fit": "lightning",
    "accelerate_loop": "accelerate",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(PROGRAMS), help="one program")
    parser.add_argument("--kills", type=int, default=2, help="workers to kill in each job")
    parser.add_argument("--lines", action="store_true", help="the lines of each patch alone")
    options = parser.parse_args()
    if options.lines:
        return print(table())
    print("program          lines  removed  added  kills  missing  repeated  prints last")
    for name, (batch, epochs) in PROGRAMS.items():
        package = PACKAGES.get(name, "torch")
        if options.only in (None, name) and importlib.util.find_spec(package) is None:
            print(f"{name:15} SKIPPED: {package} is not installed")
        elif options.only in (None, name):
            compare(name, batch, epochs, options.kills)


def table():
    """The lines of the programs and of their patches, as Markdown."""
    rows = [(name, *map(str, lines_of(name))) for name in PROGRAMS]
    rows = [("program", "lines", "removed", "added"), ("---",) * 4, *rows]
    return "\n".join(f"| {' | '.join(row)} |".replace(" --- ", "---") for row in rows)


def lines_of(name):
    """Lines of a program, and those that its patch removes and adds."""
    program, patch = ((PORTS / f"{name}.{kind}").read_text().splitlines() for kind in ("py", "patch"))
    starts = [line[:1] for line in patch[2:]]
    return len(program), starts.count("-"), starts.count("+")


def compare(name, batch, epochs, kills):
    plain = PORTS / f"{name}.py"
    patch = PORTS / f"{name}.patch"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        ended = subprocess.run([sys.executable, plain], capture_output=True, text=True, check=True)
        expected = ended.stdout.splitlines()[-1]
        ported = pathlib.Path(folder, f"{name}.py")
        subprocess.run(["patch", "--quiet", "--output", ported, plain, patch], check=True)
        options = ["--min-workers", "2"]
        with RunningJob([ported], batch=batch, epochs=epochs, options=options) as job:
            job.wait_for_steps()
            killed = job.survive_some(1, kills)
            if job.wait() != 0:
                raise SystemExit(job.text())
            # As the plain program prints it.
            start = expected.rpartition(" ")[0]
            found = [line for line in job.text().splitlines() if line.startswith(start)]
            records = job.summary()["records"]
    lines, removed, added = lines_of(name)
    print(
        f"{name:15} {lines:6} {removed:8} {added:6} {killed:6} "
        f"{records['missing']:8} {records['repeated']:9}  {expected}; with kills: {found[-1]}"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
