"""Whole jobs of real processes, for the tests."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ELASTICDL = os.environ.get("ELASTICDL")
HERE = pathlib.Path(__file__).parent

# Names the socket of `loaded.py`.
LOADER = "ELASTICDL_TEST_LOADER"

needs_elasticdl = unittest.skipUnless(
    ELASTICDL, "set ELASTICDL to the path of the command `elasticdl`, as .ci/python does"
)


def _python(program, variables):
    """The words that start a program: with PyTorch loaded, unless it begins with an option of
    Python or needs something that is set before Python starts."""
    loader = dict(variables).get(LOADER, os.environ.get(LOADER))
    early = [name for name in dict(variables) if name.startswith(("LD_", "OMP_", "PYTHON"))]
    if loader is None or early or str(program[0]).startswith("-"):
        return [sys.executable]
    return [sys.executable, "-IS", HERE / "loaded.py", loader]


class Loader:
    """Starts programs with PyTorch loaded, and with variables that count before Python starts: the
    programs of jobs with its ``variables``, of which there are none if the tests have no loader."""

    def __init__(self, variables):
        self.variables, self.process = {}, None
        if LOADER in os.environ:
            self.folder = tempfile.TemporaryDirectory()
            self.variables = {LOADER: str(pathlib.Path(self.folder.name) / "loader")}
            command = [sys.executable, HERE / "loaded.py", "serve", self.variables[LOADER]]
            self.process = subprocess.Popen(command, env={**os.environ, **variables})
            while not os.path.exists(self.variables[LOADER]) and self.process.poll() is None:
                time.sleep(0.1)

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.folder.cleanup()


class RunningJob:
    """A job on this machine."""

    def __init__(self, program, *, workers=3, batch=48, epochs=2, options=(), variables=()):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        self.directory = self.path / "job"
        words = [str(part).format(job=self.path) for part in program]
        command = [
            ELASTICDL,
            *("train", "--local", "--replace", "--job-dir", str(self.directory)),
            *("--num-workers", str(workers), "--max-workers", str(2 * workers + 2)),
            *("--global-batch-size", str(batch), "--num-epochs", str(epochs)),
            *("--worker-timeout", "20s", "--restart-without-checkpoint"),
            *options,
            *("--", *_python(program, variables), *words),
        ]
        environment = {**os.environ, **dict(variables)}
        self.log = open(self.path / "log", "w+")
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env=environment, stdin=subprocess.DEVNULL
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.log.close()
        self.folder.cleanup()

    def command(self, *words):
        return subprocess.run(
            [ELASTICDL, words[0], str(self.directory), *words[1:]],
            capture_output=True,
            text=True,
            check=False,
        )

    def status(self):
        text = self.command("status", "--json").stdout
        return json.loads(text) if text else {"workers": [], "step": 0}

    def is_running(self):
        return self.process.poll() is None

    def wait_for(self, what, wanted, seconds=120):
        deadline = time.monotonic() + seconds
        while True:
            status = self.status()
            if wanted(status):
                return status
            if not self.is_running() or time.monotonic() > deadline:
                raise AssertionError(f"not before the end or the deadline: {what}\n{self.text()}")
            time.sleep(0.05)

    def wait_for_steps(self, count=3):
        return self.wait_for(f"{count} steps", lambda status: status["step"] > count)

    def kill_any(self, rng, number=signal.SIGKILL):
        """Signals a member, if there is another one that has the state."""
        workers = self.status()["workers"]
        pids = [worker["pid"] for worker in workers if worker.get("rank") is not None]
        if len(pids) > 1:
            try:
                os.kill(rng.choice(pids), number)
            except ProcessLookupError:
                return False
            return True
        return False

    def wait(self, seconds=240):
        self.process.wait(seconds)
        return self.process.returncode

    def text(self):
        self.log.flush()
        return (self.path / "log").read_text()[-6000:]

    def summary(self):
        return json.loads((self.directory / "summary.json").read_text())

    def survive(self, seed, pauses, signals=(signal.SIGKILL,)):
        """Kills a random worker after each pause until the job ends. Returns the number."""
        rng = random.Random(seed)
        kills = 0
        self.wait_for_steps()
        while self.is_running():
            kills += self.kill_any(rng, rng.choice(signals))
            time.sleep(rng.uniform(*pauses))
        return kills

    def survive_some(self, seed, most, signals=(signal.SIGKILL,)):
        """Kills a random worker up to ``most`` times, each after two more steps, however long
        workers take to start. Returns the number."""
        rng = random.Random(seed)
        kills = step = 0
        while kills < most and self.is_running():
            now = self.status()["step"]
            if now >= step + 2 and self.kill_any(rng, rng.choice(signals)):
                kills, step = kills + 1, now
            time.sleep(0.02)
        return kills


class CountingTest(unittest.TestCase):
    """Jobs of ``RECORDS`` records whose program writes how often each one was counted."""

    def check(self, job, context):
        self.assertEqual(job.wait(), 0, f"{context}\n{job.text()}")
        records = job.summary()["records"]
        expected = self.RECORDS * self.EPOCHS
        self.assertEqual(
            [records[key] for key in ("expected", "counted", "missing", "repeated")],
            [expected, expected, 0, 0],
            context,
        )
        counts = set((job.path / "counts").read_text().splitlines())
        self.assertEqual(counts, {f"{self.EPOCHS:.1f} {self.EPOCHS:.1f}"}, context)
