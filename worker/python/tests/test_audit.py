"""Tests of jobs of PyTorch programs with --audit."""

import importlib.util
import pathlib
import random
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

import numpy
import torch

from elasticdl._randomness import Randomness
from jobs import HERE, RunningJob, needs_elasticdl


class Generators(unittest.TestCase):
    """The generators that a loop uses without saying so."""

    def test_they_give_the_numbers_of_a_seed_and_go_on_where_they_were(self):
        draw = lambda: [float(torch.rand(())), numpy.random.rand(), random.random()]
        for seed in torch.manual_seed, numpy.random.seed, random.seed:
            seed(1)
        before, expected = draw(), draw()
        for seed in torch.manual_seed, numpy.random.seed, random.seed:
            seed(1)
        self.assertEqual(draw(), before)
        generators, found = Randomness(), []
        for seed in 5, (1 << 63) - 1, 5:
            generators.seed(seed)
            found.append(draw())
        generators.reset()
        generators.reset()
        self.assertEqual(draw(), expected)
        self.assertEqual(found[0], found[2])
        self.assertEqual(len({*found[0], *found[1], *before, *expected}), 12)


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Jobs with a master. A step has 48 of 480 records."""

    STEPS = 20

    @staticmethod
    def job(net, fault, *options, workers=3, least=None, seconds=0, loaders=0):
        program = [HERE / "audited.py", net, fault, seconds, loaders]
        options = ["--min-workers", str(least or workers), *options]
        return RunningJob(program, workers=workers, options=options)

    def finish(self, job):
        """The summary of a job that has counted each record."""
        self.assertEqual(job.wait(), 0, job.text())
        summary = job.summary()
        records = summary["records"]
        self.assertEqual((records["missing"], records["repeated"]), (0, 0))
        return summary

    def test_a_worker_with_a_flipped_bit_is_replaced_and_the_result_is_as_without_it(self):
        digests = set()
        for fault in "none", "flips", "keeps":
            with self.job("plain", fault, "--audit", "100%", "--deterministic") as job:
                summary = self.finish(job)
                found = 0 if fault == "none" else 1
                audit = {**summary["audit"], "steps": None}
                expected = {"steps": None, "disagreements": found, "workers_replaced": found}
                self.assertEqual(audit, expected, job.text())
                self.assertEqual(summary["workers"]["restarts"], found, job.text())
                if found:
                    self.assertIn("wrong arithmetic: worker 2 on ", job.text())
                else:
                    self.assertEqual(summary["audit"]["steps"], self.STEPS)
                digests.add(summary["digest"])
        self.assertEqual(len(digests), 1)

    def test_kills_and_prefetched_batches_are_no_alarm(self):
        for loaders in 0, 2:
            settings = {"least": 2, "seconds": 0.02, "loaders": loaders}
            with self.job("norm", "none", "--audit", "100%", **settings) as job:
                kills = job.survive_some(loaders, 2)
                audit = self.finish(job)["audit"]
                found = audit["disagreements"], audit["workers_replaced"], kills
                self.assertEqual(found, (0, 0, 2), job.text())
                self.assertGreater(audit["steps"], 0)

    def test_a_program_that_is_not_deterministic_ends_its_job_in_the_first_step(self):
        for workers, fault, text in (
            (3, "carries", "records 0..16 of epoch 0, so the program is not deterministic"),
            (1, "carries", "records 0..48 of epoch 0, so the program is not deterministic"),
            (3, "own", "replicas have differed before, without progress since"),
        ):
            options = ["--audit", "1%", "--max-worker-restarts", "1"]
            with self.job("plain", fault, *options, workers=workers) as job:
                self.assertEqual(job.wait(), 1, job.text())
                summary = job.summary()
                self.assertIn(text, summary["error"])
                self.assertEqual(summary["steps"], 0, job.text())
                self.assertEqual(summary["workers"]["restarts"] > 0, fault == "own", job.text())

    def test_a_program_that_sums_gradients_itself_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "program.py"
            program.write_text("import elasticdl\nnext(elasticdl.sampler(40))\n")
            with RunningJob([program], workers=2, options=["--audit", "1%"]) as job:
                self.assertNotEqual(job.wait(), 0)
                self.assertIn("no gradient of the program passes through", job.summary()["error"])


if __name__ == "__main__":
    unittest.main()
