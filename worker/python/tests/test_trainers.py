"""Tests of the trainers of other packages: what they train in a job is what they train alone."""

import importlib.util
import subprocess
import sys
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

from jobs import HERE, RunningJob, needs_elasticdl


class TrainerTest:
    """A package."""

    PACKAGE = None
    # What is in the folder at the end.
    SAVED = None

    def setUp(self):
        if importlib.util.find_spec(self.PACKAGE) is None:
            self.skipTest(f"{self.PACKAGE} is not installed; .ci/python installs it")

    @needs_elasticdl
    def test_a_job_under_kills_trains_what_the_plain_trainer_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, HERE / "trainers.py", self.PACKAGE, folder, "alone"]
            ended = subprocess.run(program, capture_output=True, text=True, check=False)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        # The packages print, too.
        lines = [line for line in ended.stdout.splitlines() if line[:1].isdigit()]
        plain, alone = ([float(number) for number in line.split()] for line in lines)
        self.check(plain, alone)
        program = [HERE / "trainers.py", self.PACKAGE, "{job}/folder", "{job}/lines"]
        options = ["--min-workers", "2", "--shuffle", "none"]
        with RunningJob(program, workers=2, batch=16, epochs=3, options=options) as job:
            self.assertEqual(job.wait(), 0, job.text())
            self.assertEqual(len(list(job.path.glob("lines-*"))), 2, job.text())
            records = job.summary()["records"]
            expected = {"expected": 627, "counted": 627, "missing": 0, "repeated": 0}
            self.assertEqual({**records, **expected}, records)
            lines = (job.path / "lines").read_text().splitlines()
            self.assertEqual(len(lines), 2, job.text())
            for line in lines:
                self.check(plain, [float(number) for number in line.split()])
            saved = job.path / "folder" / self.SAVED
            self.assertGreater(saved.stat().st_size, 1000)

    def check(self, expected, found):
        """Digests of the parameters, which differ by rounding, and accuracies."""
        self.assertLess(abs(found[0] / expected[0] - 1), 1e-5, (expected, found))
        self.assertEqual(found[1], expected[1])


class Accelerate(TrainerTest, unittest.TestCase):
    PACKAGE, SAVED = "accelerate", "model.safetensors"


class Lightning(TrainerTest, unittest.TestCase):
    PACKAGE, SAVED = "lightning", "model.ckpt"


class Transformers(TrainerTest, unittest.TestCase):
    PACKAGE, SAVED = "transformers", "checkpoint-42/model.safetensors"


if __name__ == "__main__":
    unittest.main()
