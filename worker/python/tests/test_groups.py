"""Tests of optimizers with several groups of parameters."""

import importlib.util
import pathlib
import signal
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

from jobs import HERE, RunningJob, needs_elasticdl


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Whole jobs of real processes."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def job(self, *options, seconds=0, rate=0.01, order=(0, 1), workers=3):
        self.ends = self.folder / "ends"
        self.ends.write_text("")
        program = [HERE / "groups.py", seconds, self.ends, rate, *order]
        options = ["--deterministic", "--micro-batch", "6", *options]
        return RunningJob(program, workers=workers, batch=12, epochs=4, options=options)

    def run_job(self, *options, **others):
        with self.job(*options, **others) as job:
            self.assertEqual(job.wait(), 0, job.text())
            return set(self.ends.read_text().splitlines()), job.text()

    def stop(self, job):
        job.wait_for_steps(5)
        job.process.send_signal(signal.SIGTERM)
        self.assertEqual(job.wait(), 143, job.text())

    def test_orders_of_groups_change_no_bits_and_resumes_with_other_groups_are_refused(self):
        expected, _ = self.run_job(workers=1)
        with self.job(seconds=0.1) as job:
            self.assertGreater(job.survive_some(3, 2), 0)
            self.assertEqual(job.wait(), 0, job.text())
            found = set(self.ends.read_text().splitlines())
        self.assertEqual((len(found), found), (1, expected))
        # Nor does the order matter to checkpoints.
        saved = str(self.folder / "saved")
        with self.job("--checkpoint-dir", saved, seconds=0.1) as job:
            self.stop(job)
        found, text = self.run_job("--resume-from", saved)
        self.assertEqual(found, expected)
        self.assertNotIn("differs in", text)
        with self.job("--resume-from", saved, order=(1, 0)) as job:
            self.assertEqual(job.wait(), 2, job.text())
            wanted = "its state has parameter group 0 with 0.weight, 2.weight ("
            self.assertIn(wanted, job.text())
        found, text = self.run_job("--resume-from", saved, rate=0.5)
        self.assertEqual(found, expected)
        wanted = "differs in its optimizer settings (those in the checkpoint count) from"
        self.assertIn(wanted, text)


if __name__ == "__main__":
    unittest.main()
