"""Tests of the module without PyTorch.

``.ci/python`` runs them; ``python3 -m unittest discover worker/python/tests`` does, too, where the
package is installed.
"""

import array
import base64
import concurrent.futures
import contextlib
import ctypes
import io
import json
import os
import pathlib
import pickle
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

try:
    import elasticdl
except ImportError as error:
    raise unittest.SkipTest(f"{error}: install the package, with `pip install worker/python`")

import launched
from elasticdl import _launch
from jobs import HERE, CountingTest, RunningJob, needs_elasticdl

# No program here needs PyTorch.
os.environ.pop("ELASTICDL_TEST_LOADER", None)


def alone(program, timeout=60):
    """Runs a program that joins without a launcher. Returns its process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ELASTICDL_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )


COUNT = """
import collections, elasticdl
job = elasticdl.join()
def update(step, records):
    for i, value in enumerate(job.gradient):
        job.parameters[i] += value
    job.state[0] += records
job.model({records}, state=1, update=update)
orders, order = [], []
sampler = job.sampler({records}, micro_batch={micro}, global_batch={batch}, epochs=3{more})
for indices in (indices for _ in job.epochs() for indices in sampler):
    assert 0 < len(indices) <= {micro}
    order += indices
    for index in indices:
        job.gradient[index] += 1.0
    job.commit(0.5, reduction="sum")
print(set(job.parameters), job.state[0], job.records, job.epoch, job.world_size)
n = {records}
print(*[sorted(order[i * n:(i + 1) * n]) == list(range(n)) for i in range(3)])
print(order[:n] == list(range(n)), order[:n] == order[n:2 * n])
"""


class Alone(unittest.TestCase):
    """A group of one, without a master."""

    def test_every_record_counts_once_per_epoch(self):
        for records, micro, batch in (100, 7, 21), (10, 32, 32), (97, 5, 13), (3, 1, 2):
            text = COUNT.format(records=records, micro=micro, batch=batch, more="")
            ended = alone(text)
            lines = ended.stdout.splitlines()
            self.assertEqual(
                lines[:2],
                [f"{{3.0}} {3.0 * records} {3 * records} 3 1", "True True True"],
                ended.stderr,
            )
            if records > 10:
                self.assertEqual(lines[2], "False False", "shuffled, and anew in each epoch")

    def test_a_process_without_a_launcher_may_join_again(self):
        text = COUNT.format(records=20, micro=4, batch=8, more="")
        ended = alone(text + text.replace("epochs=3", "epochs=2"))
        self.assertIn("{3.0} 60.0 60 3 1", ended.stdout, ended.stderr)
        self.assertIn("{2.0} 40.0 40 2 1", ended.stdout, ended.stderr)

    def test_order_without_shuffle(self):
        text = COUNT.format(records=50, micro=7, batch=21, more=", shuffle=False")
        self.assertEqual(alone(text).stdout.splitlines()[2], "True True")

    def test_max_steps(self):
        text = COUNT.format(records=50, micro=5, batch=10, more=", max_steps=4")
        ended = alone(text)
        self.assertIn(" 40.0 40 0 1\n", ended.stdout, ended.stderr)

    def test_errors_say_what_is_right(self):
        join = "import elasticdl; job = elasticdl.join(); "
        for program, expected in (
            (join + "job.sampler(0)", "length is 0; it must be at least 1"),
            (join + "job.sampler(10, micro_batch=True)", "micro_batch is True; it must be an int"),
            (join + "job.sampler(10, global_batch=-1)", "global_batch is -1; it must be at least"),
            (join + "next(job.sampler(10))", "call job.model() before"),
            (join + "job.gradient", "there is no memory before the first"),
            (join + "job.model(3); job.commit()", "draw one from the sampler"),
            (
                join + "job.model(3); next(job.sampler(9)); job.commit(); job.commit()",
                "there is no micro-batch to deliver",
            ),
            (
                join + "job.model(3); s = job.sampler(9); next(s); job.model(3)",
                "model() must be called before the first",
            ),
            (
                join
                + "job.model(3, update=lambda s, r: 1 / 0); next(job.sampler(9)); job.commit()",
                "ZeroDivisionError",
            ),
        ):
            ended = alone(program)
            self.assertIn(expected, ended.stderr)
            self.assertEqual(ended.returncode, 1, program)

    def test_an_interrupt_ends_a_wait(self):
        program = (
            "import elasticdl, signal, os, threading, time\n"
            "job = elasticdl.join()\n"
            "def update(step, records):\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "    time.sleep(20)\n"
            "job.model(3, update=update)\n"
            "next(job.sampler(9)); job.commit()\n"
        )
        begun = time.monotonic()
        ended = alone(program)
        self.assertIn("KeyboardInterrupt", ended.stderr)
        self.assertLess(time.monotonic() - begun, 15)


POD = """
import os, pathlib, sys, time
start = [str(os.environ.get("ELASTICDL_" + name)) for name in ("WORKERS", "LAUNCH", "INDEX")]
starts = pathlib.Path(__file__).with_name("starts")
with open(starts, "a") as file:
    file.write(" ".join(start + sys.argv[1:]) + "\\n")
if "ELASTICDL_SUPERVISOR" in os.environ:
    # A failure would end the other before its start.
    while len(starts.read_text().splitlines()) < 3:
        time.sleep(0.01)
    sys.exit(3 * int(os.environ["ELASTICDL_INDEX"]))
import elasticdl
elasticdl.join()
"""


class Pods(unittest.TestCase):
    """A pod of several workers."""

    def test_the_first_process_starts_the_program_once_for_each_worker(self):
        variables = {"MASTER": "127.0.0.1:1", "WORKERS": "2", "LAUNCH": "5"}
        variables = {f"ELASTICDL_{name}": value for name, value in variables.items()}
        with tempfile.TemporaryDirectory() as folder:
            # Which is not in the folder of the package, and has arguments.
            program = pathlib.Path(folder, "train.py")
            program.write_text(POD)
            ended = subprocess.run(
                [sys.executable, program, "--width", "8"],
                capture_output=True,
                text=True,
                timeout=60,
                env=os.environ | variables,
                check=False,
            )
            starts = sorted(pathlib.Path(folder, "starts").read_text().splitlines())
        expected = ["2 5 None", "None 5 0", "None 6 1"]
        self.assertEqual(starts, [f"{start} --width 8" for start in expected], ended)
        self.assertEqual(ended.returncode, 3, ended)


class Tensor:
    """What a library without checks lends: f32 of any ``shape``, by DLPack."""

    def __init__(self, shape):
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.memory = (ctypes.c_float * 4)()
        # DLTensor: data, device, dimensions, type, shape, strides, offset.
        head = ctypes.addressof(self.memory), 1, 0, len(shape), 2, 32, 1
        tail = ctypes.addressof(self.shape), 0, 0, 0, 0
        self.managed = ctypes.create_string_buffer(struct.pack("=QiiiBBHQQQQQ", *head, *tail))

    def __dlpack__(self):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        return new(ctypes.addressof(self.managed), b"dltensor", None)


class RingTest(unittest.TestCase):
    """A group of ranks that are threads of one process."""

    def connected(self, size):
        rings = [elasticdl.Ring("127.0.0.1") for _ in range(size)]
        addresses = [ring.address for ring in rings]

        def connect(rank, ring):
            options = {"name": "test", "secret": b"secret", "timeout": 20.0}
            ring.connect(rank=rank, addresses=addresses, **options)

        self.on_each(rings, connect)
        return rings

    @staticmethod
    def on_each(rings, act):
        with concurrent.futures.ThreadPoolExecutor(len(rings)) as pool:
            return list(pool.map(act, range(len(rings)), rings))

    def test_ranks_get_sums_blocks_and_broadcasts_of_buffers(self):
        rings = self.connected(3)

        def act(rank, ring):
            values = array.array("f", [rank, 1.0, -0.5] * 20000)
            ring.all_reduce(values)
            gathered = ring.all_gather(bytearray([rank] * 3))
            text = bytearray([rank] * 5)
            ring.broadcast(1, text)
            return values[:3].tolist(), gathered, text

        expected = [3.0, 3.0, -1.5], [b"\0\0\0", b"\1\1\1", b"\2\2\2"], b"\1\1\1\1\1"
        self.assertEqual(self.on_each(rings, act), [expected] * 3)

    def test_operations_that_were_begun_end_in_order(self):
        rings = self.connected(2)

        def act(rank, ring):
            values, order, ended = array.array("f", [1.0] * 1000), [], threading.Event()
            for _ in range(2):
                ring.begin_all_reduce(values, 20.0, order.append)
            ring.begin_broadcast(0, values, 20.0, lambda error: order.append((error, "sent")))
            ring.begin_call(lambda: 1 / 0, 20.0, lambda error: order.append(str(error)))
            ring.begin_barrier(20.0, lambda error: ended.set())
            self.assertTrue(ended.wait(20))
            ring.shut_down()
            with self.assertRaisesRegex(RuntimeError, "was shut down"):
                ring.begin_barrier(1.0, print)
            return values[0], order

        expected = 4.0, [None, None, (None, "sent"), "division by zero"]
        self.assertEqual(self.on_each(rings, act), [expected] * 2)

    def test_an_operation_that_takes_too_long_ends_the_group(self):
        rings = self.connected(2)
        ended, errors = threading.Event(), []
        done = lambda error: (errors.append(str(error)), ended.set())
        rings[0].begin_barrier(0.2, done)
        self.assertTrue(ended.wait(20))
        self.assertEqual(errors, ["no result after 0.2 s"])

    def test_memory_that_has_no_sum_is_refused(self):
        (ring,) = self.connected(1)
        for memory, error, expected in (
            (array.array("d", [1.0]), ValueError, "sums are of arrays of f32"),
            (bytearray(8), ValueError, "sums are of arrays of f32"),
            (b"1234", BufferError, "not writable"),
            ([1.0], TypeError, "a list has neither the buffer protocol nor __dlpack__()"),
        ):
            with self.assertRaisesRegex(error, expected.replace("(", r"\(").replace(")", r"\)")):
                ring.all_reduce(memory)

    def test_a_tensor_whose_shape_is_no_size_of_memory_is_refused(self):
        (ring,) = self.connected(1)
        for shape in ([1 << 62, 4], [-1]):
            with self.assertRaisesRegex(BufferError, "is no size of memory"):
                ring.all_reduce(Tensor(shape))


HANGS = """
import ctypes, os, time, elasticdl
job = elasticdl.join()
job.model(60, update=lambda step, total: None)
def hangs_in_sleep():
    time.sleep(1e6)
def hangs_with_lock():
    # Without letting go of the interpreter's lock.
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
sampler = job.sampler(60, micro_batch=7)
for indices in (indices for _ in job.epochs() for indices in sampler):
    hangs_in_sleep() if os.environ["ELASTICDL_LAUNCH"] == "1" else hangs_with_lock()
"""


SLOW = """
import time, elasticdl, helper
job = elasticdl.join()
job.model(400)
sampler = job.sampler(400, micro_batch=4)
for indices in (indices for _ in job.epochs() for indices in sampler):
    time.sleep(helper.PAUSE)
    job.commit()
"""


@needs_elasticdl
class Jobs(CountingTest):
    def test_the_python_stacks_of_workers_that_hang_are_shown(self):
        with RunningJob(["-c", HANGS], workers=2, options=["--step-timeout", "1h"]) as job:
            job.wait_for("two workers", lambda status: len(status["workers"]) == 2)
            wanted = {"hangs_in_sleep (<string>:", "hangs_with_lock (<string>:"}
            deadline = time.monotonic() + 60
            while missing := [name for name in wanted if name not in job.command("debug").stdout]:
                self.assertLess(time.monotonic(), deadline, (missing, job.command("debug")))
            # Once more, while a request of Python's thread is open.
            shown = job.command("debug").stdout
            self.assertTrue(all(name in shown for name in wanted), shown)
            job.command("stop", "--force")

    """Jobs with a master."""

    RECORDS, EPOCHS = 3000, 2

    def job(self, **options):
        program = [HERE / "count.py", self.RECORDS, 1500, "{job}/counts"]
        return RunningJob(program, epochs=self.EPOCHS, **options)

    def test_records_count_once_under_kills(self):
        for seed in range(int(os.environ.get("ELASTICDL_PYTHON_SCHEDULES", "2"))):
            with self.subTest(seed=seed), self.job() as job:
                signals = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)
                kills = job.survive(seed, (0.5, 2.0), signals)
                self.check(job, f"seed {seed}, {kills} kills")
                self.assertGreater(kills, 1, f"seed {seed}: too fast to be disturbed")

    def test_each_line_of_the_logs_of_workers_in_json_names_them(self):
        with self.job(workers=2, options=["--log-format", "json"]) as job:
            self.check(job, "logs in JSON")
            run_id = job.summary()["run_id"]
            for log in (job.directory / "logs").glob("worker-*.log"):
                lines = [json.loads(line) for line in log.read_text().splitlines()]
                number = int(log.stem.removeprefix("worker-"))
                named = {(line["job"], line["run_id"], line["worker"]) for line in lines}
                self.assertEqual(named, {(job.summary()["job"], run_id, number)})
                built = [line for line in lines if line["message"] == "ring built"]
                self.assertTrue(built, lines)
                for line in built:
                    self.assertEqual(line["generation"], line["fields"]["generation"])

    def test_workers_join_and_leave(self):
        with self.job(workers=1) as job:
            job.wait_for_steps()
            self.assertEqual(job.command("scale", "--num-workers", "3").returncode, 0)
            members = lambda status: [w for w in status["workers"] if w.get("rank") is not None]
            job.wait_for("three members", lambda status: len(members(status)) == 3)
            job.wait_for("the metric", lambda status: status["metrics"] == {"seen": 2.0})
            self.assertEqual(job.command("scale", "--num-workers", "1").returncode, 0)
            self.check(job, "scaled")

    def test_a_function_is_trained_by_a_job_and_its_summary_is_returned(self):
        sizes = {"global_batch_size": 20, "num_epochs": 2}
        for workers, pause in (2, 0.02), (1, 0.0):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                options = {"num_workers": workers, "min_workers": workers, **sizes}
                summary = elasticdl.launch(launched.count, 100, pause, **options)
            self.assertEqual(summary["records"]["counted"], 200, printed.getvalue())
            self.assertEqual(summary["workers"]["peak"], workers, printed.getvalue())
            for line in "after epoch 0 {1.0}", "after epoch 1 {2.0}":
                self.assertEqual(printed.getvalue().splitlines().count(line), 1, line)
        with contextlib.redirect_stdout(printed), self.assertRaisesRegex(
            RuntimeError, "code 1: .*TypeError|code 1"
        ):
            elasticdl.launch(launched.count, 100, "no pause", max_worker_restarts=0, **sizes)
        self.assertIn("TypeError", printed.getvalue())
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
            error = "code 2: unexpected argument '--num-worker' found; tip: .*'--num-workers'"
            with contextlib.redirect_stdout(printed), self.assertRaisesRegex(RuntimeError, error):
                elasticdl.launch(launched.count, 100, 0.0, num_worker=2)
            self.assertEqual(os.listdir(folder), [])
            error = r"choose at most 100; what the workers printed is in (.*)"
            with contextlib.redirect_stdout(printed), self.assertRaisesRegex(
                RuntimeError, error
            ) as raised:
                elasticdl.launch(launched.count, 100, 0.0, global_batch_size=101)
            self.assertTrue(os.listdir(re.search(error, str(raised.exception))[1]))
        for act, expected in (
            (lambda: elasticdl.launch(3), "takes a function, not int"),
            (lambda: elasticdl.launch(len, bytes(1 << 16), image="x"), "at most 64"),
        ):
            with self.assertRaisesRegex((TypeError, ValueError), expected):
                act()

    def test_a_function_is_trained_in_an_image(self):
        # In place of the command: what a pod of the image would run, of which there is no cluster.
        with tempfile.TemporaryDirectory() as folder:
            command = pathlib.Path(folder) / "elasticdl"
            command.write_text(
                "#!/usr/bin/env python3\n"
                "import pathlib, subprocess, sys\n"
                "words = sys.argv[1:]\n"
                "program = words[words.index('--') + 1:]\n"
                "assert words[0] == 'train' and '--image=x' in words, words\n"
                "assert program[0] == 'python3', words\n"
                "assert not any('$' in word for word in program), program\n"
                "subprocess.run([sys.executable, *program[1:]], check=True)\n"
                "summary = next(word for word in words if word.startswith('--summary='))\n"
                "pathlib.Path(summary.split('=')[1]).write_text('{\"state\": \"completed\"}')\n"
            )
            command.chmod(0o755)
            printed = io.StringIO()
            with mock.patch.dict(os.environ, ELASTICDL=str(command)), \
                    contextlib.redirect_stdout(printed):
                summary = elasticdl.launch(launched.count, 10, 0.0, image="x")
            self.assertEqual(summary, {"state": "completed"}, printed.getvalue())
            self.assertIn("after epoch 0 {1.0}", printed.getvalue())
        call = pickle.dumps(((3, 0), True, b""))
        with self.assertRaisesRegex(RuntimeError, "of Python 3.0, and the image has 3"):
            _launch.run_text(base64.urlsafe_b64encode(call))

    def test_an_exception_reaches_the_summary_with_its_traceback(self):
        for error, expected in (
            ("ValueError(f'no loss for {len(indices)}')", "ValueError: no loss for"),
            ("KeyboardInterrupt", "worker 1 failed: KeyboardInterrupt ("),
        ):
            with self.subTest(error), tempfile.TemporaryDirectory() as folder:
                program = pathlib.Path(folder) / "program.py"
                program.write_text(
                    "import elasticdl\n"
                    "job = elasticdl.join()\n"
                    "job.model(10)\n"
                    "for indices in job.sampler(10):\n"
                    f"    raise {error}\n"
                )
                options = ["--max-worker-restarts", "0"]
                with RunningJob([program], workers=1, batch=5, epochs=1, options=options) as job:
                    self.assertEqual(job.wait(), 1, job.text())
                    text = str(job.summary())
                    self.assertIn(expected, text)
                    self.assertIn("program.py", text)
                    self.assertNotIn("must not be left", text)

    def test_what_the_package_refuses_before_training_ends_the_job_with_its_first_worker(self):
        for use, expected in (
            ("job.sampler(10, global_batch=7)", "--global-batch-size 48; make them equal"),
            # After the model is declared, at the first draw.
            ("next(iter(job.sampler(100)))", "there are 2 epochs"),
        ):
            with self.subTest(use), tempfile.TemporaryDirectory() as folder:
                program = pathlib.Path(folder) / "program.py"
                program.write_text(
                    f"import elasticdl\njob = elasticdl.join()\njob.model(10)\n{use}\n"
                )
                with RunningJob([program], workers=2) as job:
                    self.assertEqual(job.wait(), 1, job.text())
                    self.assertEqual(job.summary()["workers"]["restarts"], 0, job.text())
                    self.assertRegex(job.summary()["error"], f"{expected}.*program.py, line 4")

    def test_what_the_package_refuses_in_the_loop_ends_the_job_when_two_workers_say_so(self):
        for workers in 1, 2:
            with self.subTest(workers), tempfile.TemporaryDirectory() as folder:
                program = pathlib.Path(folder) / "program.py"
                program.write_text(
                    "import elasticdl\n"
                    "job = elasticdl.join()\n"
                    "job.model(10)\n"
                    "for indices in job.sampler(100):\n"
                    "    if job.step == 2:\n"
                    "        job.model(10)\n"
                    "    job.commit(0.0)\n"
                )
                with RunningJob([program], workers=workers, batch=10, epochs=1) as job:
                    self.assertEqual(job.wait(), 1, job.text())
                    summary = job.summary()
                    self.assertLessEqual(summary["workers"]["restarts"], 1, job.text())
                    self.assertRegex(summary["error"], "line 6\\) \\(as worker \\d before")

    def test_a_program_is_the_files_that_it_loads_and_an_error_names_those_that_differ(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "helper.py").write_text("PAUSE = 0.05\n")
            (folder / "program.py").write_text(SLOW)
            with RunningJob([folder / "program.py"], workers=2, batch=8) as job:
                rng = random.Random(1)
                ids = lambda s: {w["worker"] for w in s["workers"] if w.get("rank") is not None}
                before = ids(job.wait_for("two members", lambda s: len(ids(s)) == 2))
                (folder / "unrelated.py").write_text("a program that nobody loads")
                self.assertTrue(job.kill_any(rng))
                job.wait_for("the replacement", lambda s: len(ids(s)) == 2 and ids(s) != before)
                self.assertNotIn("another build", job.text())
                (folder / "helper.py").write_text("PAUSE = 0.06\n")
                self.assertTrue(job.kill_any(rng))
                job.wait_for("the refusal", lambda _: "another build" in job.text())
                (folder / "helper.py").write_text("PAUSE = 0.05\n")
                self.assertRegex(
                    job.text(),
                    "differs in its Python sources \\(helper.py: [0-9a-f]{16} in its group, "
                    "[0-9a-f]{16} here\\);",
                )
                self.assertEqual(job.wait(), 0, job.text())


if __name__ == "__main__":
    unittest.main()
