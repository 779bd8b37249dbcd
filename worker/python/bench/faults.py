"""Goodput under kills, and pauses after kills, joins and hangs, of a program that counts records.

Every worker writes the time of each step that it commits to one file. A step counts when it is
committed for the first time: what a restart repeats is no progress.
"""

import array
import contextlib
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from progress import MILLISECONDS_PER_RECORD, RECORDS_PER_STEP
from systems import HERE, SYSTEMS


def print_pauses(options):
    """The longest intervals without a new step after single faults."""
    count = max(options.workers)
    step = RECORDS_PER_STEP * MILLISECONDS_PER_RECORD / count
    print(f"longest interval without a new step after an event, in ms; {count} workers; a step")
    print(f"without events takes {step:.0f} ms. `-`: no new step within {PATIENCE:g} s")
    print("  event  with       each of the events")
    for event in "kill", "join", "hang":
        for name in available():
            with tempfile.TemporaryDirectory() as folder:
                run = Run(name, count, 200_000, folder, first=count - (event == "join"))
                pauses = run.pauses(event, 1 if event == "join" else options.rounds)
            shown = "  ".join("-" if pause is None else f"{1000 * pause:.0f}" for pause in pauses)
            print(f"  {event:5}  {name:9}  {shown}", flush=True)


def available():
    """Names of the systems that are installed."""
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed, and left out (pip install torchft)")
    names = [name for name in SYSTEMS if hasattr(SYSTEMS[name], "join")]
    names = [name for name in names if name not in ("elasticdl-spare", "elasticdl-tables")]
    return [name for name in names if name != "torchft" or importlib.util.find_spec(name)]


class Run:
    """One program, which runs with a system."""

    def __init__(self, name, count, records, folder, first=None):
        self.count = count
        self.records = records
        self.path = f"{folder}/counts"
        first = count if first is None else first
        self.system = SYSTEMS[name](count, first, [str(records), self.path], folder)
        self.first = first
        self.is_cut_off = False
        self.log = open(f"{folder}/log", "w")
        self.processes = [self._start(command) for command in self.system.commands()]

    def _start(self, command):
        return subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=HERE)

    def steps(self):
        """Time of each step that is new, with the number of workers that took it."""
        with contextlib.suppress(FileNotFoundError), open(f"{self.path}.steps") as file:
            newest, steps = 0, []
            for line in file.read().splitlines():
                at, step, workers = line.split()
                if int(step) > newest:
                    steps += [(float(at), int(workers))] * (int(step) - newest)
                    newest = int(step)
            return steps
        return []

    def is_running(self):
        return self.processes[0].poll() is None

    def wait_for_group(self, workers, limit):
        """Waits for a few steps of a group of this size. Returns whether there are any."""
        after = time.monotonic()
        while self.is_running() and time.monotonic() < after + limit:
            if sum(size == workers and at > after for at, size in self.steps()) >= SETTLED:
                return True
            time.sleep(0.1)
        return False

    def kill_until_done(self, every, limit):
        """Kills a worker at each interval, until the program or its time ends. Returns when."""
        kills = []
        if self.wait_for_group(self.count, START_LIMIT):
            last = began = time.monotonic()
            while self.is_running() and time.monotonic() < began + limit:
                time.sleep(0.02)
                if every and time.monotonic() > last + every:
                    last += every
                    if self.signal_one(signal.SIGKILL) is not None:
                        kills.append(time.monotonic())
        self.end()
        return kills

    def pauses_after(self, kills):
        """From each kill to the next new step or the run's end, in seconds."""
        times = [at for at, _ in self.steps()] + [time.monotonic()]
        return [min(at - kill for at in times if at > kill) for kill in kills]

    def pauses(self, event, rounds):
        """The longest interval without a new step after each of some events."""
        pauses = []
        size = self.first
        if self.wait_for_group(size, START_LIMIT):
            for _ in range(rounds):
                began = time.monotonic()
                stopped = None
                if event == "join":
                    size += 1
                    command = self.system.join(self.processes[0].pid)
                    if command:
                        self.processes.append(self._start(command))
                else:
                    is_kill = event == "kill"
                    stopped = self.signal_one(signal.SIGKILL if is_kill else signal.SIGSTOP)
                # Until the group is whole again.
                whole = self.wait_for_group(size, PATIENCE)
                times = [at for at, _ in self.steps()]
                before = max((at for at in times if at <= began), default=began)
                after = [at for at in times if at > began]
                ends = [before, *after]
                longest = max((b - a for a, b in zip(ends, after)), default=None)
                # Without the whole group, the event has not been dealt with.
                pauses.append(longest if whole else None)
                if stopped is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(stopped, signal.SIGKILL)
                if not whole:
                    break
        self.end()
        return pauses or [None]

    def signal_one(self, number):
        """Signals the worker that has run longest, if there are several. Returns its process id."""
        parents = [process.pid for process in self.processes]
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_text().split("\0")
                if any(self.system.program in word for word in words[:3]):
                    if descends(int(folder.name), parents):
                        found.append(int(folder.name))
        if len(found) < 2:
            return None
        os.kill(min(found), number)
        return min(found)

    def goodput(self):
        """New records per second, from the first step of the whole group to the last step, divided
        by what the workers compute without faults."""
        steps = self.steps()
        start = next((at for at, size in steps if size == self.count), None)
        end = steps[-1][0] if self.counts() else time.monotonic()
        if start is None or end <= start:
            return 0.0
        counts = self.counts()
        share = 1 - counts[0] / self.records if counts else 1.0
        records = RECORDS_PER_STEP * sum(at > start for at, _ in steps) * share
        return records * MILLISECONDS_PER_RECORD / 1000 / self.count / (end - start)

    def counts(self):
        """Records lost and repeated, once the program has written how often it counted each."""
        if self.is_cut_off:
            return None
        counts = array.array("f")
        try:
            counts.frombytes(pathlib.Path(self.path).read_bytes())
        except FileNotFoundError:
            return None
        times = [round(count) for count in counts] + [0] * (self.records - len(counts))
        return times.count(0), sum(count - 1 for count in times if count > 1)

    def end(self):
        """Ends what runs."""
        self.is_cut_off = self.counts() is None
        if self.is_cut_off:
            for process in self.processes:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.log.close()


def descends(pid, parents):
    """Whether a process descends from one of these."""
    while pid > 1:
        if pid in parents:
            return True
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rsplit(")", 1)[1].split()[1])
    return False


# Seconds for which a first group and a later one are waited for.
START_LIMIT = 120.0
PATIENCE = 60.0
# Number of steps after which a group has settled.
SETTLED = 10

if __name__ == "__main__":
    sys.exit("run .bench/pytorch")
