"""Tests of random numbers that belong to records, with PyTorch."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

import torch

import elasticdl.torch as et
from elasticdl.torch._random import uniform
from jobs import HERE, RunningJob, needs_elasticdl


class Uniform(unittest.TestCase):
    """The numbers themselves."""

    def test_numbers_are_those_of_split_mix_64(self):
        # The first output of the reference implementation for the seed 1234567.
        first = 6457827717110365317
        expected = (first >> 40) * 2.0**-24
        self.assertEqual(uniform([1234567], 3)[0, 0].item(), expected)

    def test_numbers_are_uniform_and_independent_of_other_rows(self):
        numbers = uniform(range(100), 1000)
        self.assertTrue(0 <= numbers.min() and numbers.max() < 1)
        self.assertLess(abs(float(numbers.mean()) - 0.5), 0.005)
        histogram = torch.histc(numbers, 10, 0, 1) / numbers.numel()
        self.assertLess(float((histogram - 0.1).abs().max()), 0.005)
        self.assertTrue(torch.equal(numbers[40:41], uniform([40], 1000)))

    def test_dropout_without_a_job_says_what_is_missing(self):
        with self.assertRaisesRegex(RuntimeError, "needs a job; call elasticdl.torch.join"):
            et.Dropout(0.5)(torch.ones(3, 3))
        self.assertTrue(torch.equal(et.Dropout(0.5).eval()(torch.ones(3)), torch.ones(3)))


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Jobs with a master, beside one process."""

    RECORDS = 600

    def test_random_numbers_of_a_record_do_not_depend_on_the_workers(self):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/alone"
            program = [sys.executable, HERE / "dropout.py", str(self.RECORDS), "0", path]
            alone = {k: v for k, v in os.environ.items() if not k.startswith("ELASTICDL_")}
            subprocess.run([*program, "0", "alone"], check=True, env=alone)
            expected, values = self.read(path)
        self.assertEqual(len(expected), 2 * self.RECORDS)
        self.assertEqual(len({line.split(" ", 2)[2] for line in expected}), len(expected))
        masks = [number for line in expected for number in map(float, line.split()[2:10])]
        self.assertAlmostEqual(masks.count(0.0) / len(masks), 1 - 0.75 * 0.5, delta=0.03)
        program = [HERE / "dropout.py", self.RECORDS, 500, "{job}/lines", 1]
        with RunningJob(program, options=["--seed", "5"]) as job:
            self.assertEqual(job.wait(), 0, job.text())
            found, same = self.read(str(job.path / "lines"))
        self.assertEqual(found, expected)
        worst = max(abs(a - b) for a, b in zip(values, same, strict=True))
        self.assertLess(worst, 1e-6)

    @staticmethod
    def read(path):
        with open(path) as lines, open(path + ".values") as values:
            return set(lines), [float(value) for value in values.read().split()]


if __name__ == "__main__":
    unittest.main()
