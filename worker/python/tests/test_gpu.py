"""Whole jobs of PyTorch programs whose memory is on fake GPUs; see ``on_fake_gpu.py``."""

import importlib.util
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

import torch
from jobs import HERE, Loader, RunningJob, needs_elasticdl

STAND_INS = os.environ.get("ELASTICDL_STAND_INS")
FAKE = HERE / "on_fake_gpu.py"
FAKES = {"LD_LIBRARY_PATH": STAND_INS or "", "OMP_NUM_THREADS": "1"}
RECORDS = 1500


@needs_elasticdl
@unittest.skipUnless(STAND_INS, "set ELASTICDL_STAND_INS to their folder, as .ci/python does")
class Gpu(unittest.TestCase):
    """Jobs that count records, and what they need of PyTorch."""

    def test_the_compiler_and_nccl_of_pytorch_are_found_by_their_names(self):
        program = (
            "import ctypes, torch\nfor name in 'libnvrtc.so.13', 'libnccl.so.2':\n"
            "    ctypes.CDLL(name)\n"
        )
        if not torch.version.cuda or not torch.version.cuda.startswith("13."):
            self.skipTest("this PyTorch has no CUDA 13")
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual(ended.returncode, 0, ended.stderr)

    @classmethod
    def setUpClass(cls):
        cls.loader = Loader(FAKES)

    @classmethod
    def tearDownClass(cls):
        cls.loader.end()

    def job(self, program, *arguments, records=RECORDS, variables=(), **options):
        # PyTorch has loaded the real NCCL.
        defaults = {"ELASTICDL_NCCL": f"{STAND_INS}/libnccl.so.2"}
        defaults |= self.loader.variables or FAKES
        # Longer than the end of a program takes.
        release = {"STAND_IN_CHECKS_EXIT": "1", "STAND_IN_RELEASE_MS": "1000"}
        variables = {**defaults, **release, **dict(variables)}
        program = [FAKE, HERE / program, records, *arguments]
        return RunningJob(program, epochs=2, variables=variables, **options)

    def check_exact(self, job, expected=2.0):
        self.assertEqual(job.wait(), 0, job.text())
        lines = (job.path / "counts").read_text().splitlines()
        self.assertTrue(lines)
        for line in lines:
            self.assertTrue(all(float(n) == expected for n in line.split()[:2]), line)
        # Code 0, or killed by the test, or by the master some time after the job's end.
        self.assertLessEqual(set(self.exits(job)), {"Code(0)", "Signal(9)"}, job.text())
        return job.summary()

    def exits(self, job):
        log = (job.directory / "logs" / "master.log").read_text()
        return re.findall("worker process ended .* exit=(.*)", log)

    def wait_for_nccl(self, job):
        """Waits for a group of several workers whose gradients go over NCCL."""

        def is_there(status):
            members = [w for w in status["workers"] if w.get("rank") is not None]
            return len(members) > 1 and "NCCL 2" in (status.get("allreduce_transport") or "")

        return job.wait_for("several workers on NCCL", is_there)["generation"]

    def test_records_are_counted_once_under_kills_and_over_nccl(self):
        for seed, (program, option) in enumerate(
            (("count_torch.py", 0), ("count_overlap.py", True))
        ):
            # However long workers take to start.
            options = {"options": ["--min-workers", "2"]}
            arguments = (program, 8000, "{job}/counts", option)
            with self.subTest(program), self.job(*arguments, **options) as job:
                rng = random.Random(seed)
                for _ in range(2):
                    generation = self.wait_for_nccl(job)
                    self.assertTrue(job.kill_any(rng), job.text())
                    job.wait_for("another group", lambda s: s["generation"] > generation)
                self.wait_for_nccl(job)
                self.check_exact(job)

    def test_a_worker_that_leaves_ends_with_its_exit_code_whatever_nccl_does(self):
        # Communicators are never released, or late.
        never = {"ELASTICDL_NCCL": f"{STAND_INS}/libnccl.abort_lasts.so"}
        # A process that has loaded PyTorch itself ends as that of a user does.
        for variables in (never | FAKES, FAKES):
            # The job outlasts the exit.
            arguments = ("count_torch.py", 50000, "{job}/counts", 0)
            options = {"options": ["--min-workers", "2"], "variables": variables}
            with self.subTest(variables), self.job(*arguments, **options) as job:
                self.wait_for_nccl(job)
                self.assertTrue(job.kill_any(random.Random(0), signal.SIGTERM))
                job.wait_for("the exit of a worker", lambda _: self.exits(job))
                self.assertEqual(self.exits(job), ["Code(0)"], job.text())

    def test_work_on_other_streams_is_ordered_with_that_of_the_trainer(self):
        options = {"records": 300, "workers": 2, "options": ["--min-workers", "2"]}
        for work in ("alive", "stream", "thread"):
            arguments = ("count_overlap.py", 0, "{job}/counts", True, work)
            with self.subTest(work), self.job(*arguments, **options) as job:
                self.check_exact(job)

    def test_a_worker_alone_and_a_group_without_nccl_count_once(self):
        for workers, variables in ((1, {}), (2, {"ELASTICDL_NCCL": "off"})):
            with self.subTest(workers=workers), self.job(
                "count_torch.py", 100, "{job}/counts", 0, workers=workers, variables=variables
            ) as job:
                summary = self.check_exact(job)
                self.assertNotIn("NCCL 2", summary["allreduce_transport"])

    def test_a_divided_optimizer_counts_once_under_a_kill(self):
        options = ["--min-workers", "2", "--shard-optimizer"]
        with self.job("count_torch.py", 8000, "{job}/counts", 0, options=options) as job:
            self.assertEqual(job.survive_some(0, most=1), 1, "too fast to be disturbed")
            summary = self.check_exact(job)
        transport = summary["allreduce_transport"]
        self.assertIn("from GPUs by way of the hosts' memory, where --shard-optimizer", transport)

    def test_a_divided_optimizer_trains_the_bits_of_one_on_a_cpu(self):
        options = {"workers": 1, "batch": 40}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "ends"
            path.write_text("")
            sharded = {**options, "options": ["--shard-optimizer"]}
            with RunningJob([HERE / "sharded.py", 0, path], **sharded) as job:
                self.assertEqual(job.wait(), 0, job.text())
            with self.job("sharded.py", path, records=0, **sharded) as job:
                self.assertEqual(job.wait(), 0, job.text())
            on_cpu, on_gpu = path.read_text().splitlines()
        self.assertEqual(on_gpu, on_cpu)

    def test_rows_of_tables_count_touches_under_a_kill(self):
        options = ["--min-workers", "2", "--validation-data", "all", "--best-metric", "users:max"]
        arguments = ("count_rows.py", 48, 8000, 0)
        with self.job(*arguments, records=960, options=options) as job:
            self.assertEqual(job.survive_some(0, most=1), 1, "too fast to be disturbed")
            self.assertEqual(job.wait(), 0, job.text())
            summary = job.summary()
        touches = {"expected": 4800, "counted": 4800, "missing": 0, "repeated": 0}
        self.assertEqual(summary["row_touches"], touches)
        metrics = summary["evaluations"]["all"][-1]["metrics"]
        self.assertEqual((metrics["users"], metrics["squares"]), (48.0, 12441.6))
