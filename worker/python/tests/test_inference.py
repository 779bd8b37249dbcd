"""Tests of `elasticdl evaluate`, `elasticdl predict` and `--validation-data` with PyTorch."""

import csv
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

import torch

import elasticdl.torch as et
from applied import RECORDS, build, data, metrics
from jobs import ELASTICDL, HERE, RunningJob, needs_elasticdl


class Applied:
    """A job that evaluates or predicts, in a folder."""

    def __init__(self, verb, folder, model, *options, program=(), workers=2):
        self.directory = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "job"
        command = [ELASTICDL, verb, "--local", "--replace", "--job-dir", self.directory, "--model", model]
        command += ["--data", "test.csv", "--num-workers", str(workers)]
        command += ["--records-per-shard", "40", "--minibatch-size", "16", *options]
        self.process = subprocess.Popen(
            [*command, "--", sys.executable, HERE / "applied.py", *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self):
        """Returns the exit code and the output."""
        output, _ = self.process.communicate(timeout=240)
        return self.process.returncode, output

    def summary(self):
        return json.loads((self.directory / "summary.json").read_text())


def expected(net):
    """Metrics over all records, and predictions, by a plain loop."""
    x, y = data(RECORDS, 2).tensors
    with torch.no_grad():
        found = metrics(net.eval(), x, y)
        rows = torch.softmax(net(x), 1).max(1)
    return float(found["loss"]), float(found["accuracy"].double().mean()), rows


@needs_elasticdl
class Inference(unittest.TestCase):
    """Jobs of a program that trains, evaluates and predicts."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.model, cls.best = cls.folder / "model.safetensors", cls.folder / "best.safetensors"
        options = ["--export", str(cls.model), "--export-best", str(cls.best)]
        options += ["--training-data", "training.csv", "--validation-data", "validation.csv"]
        options += ["--evaluate-every", "3"]
        with RunningJob(
            [HERE / "applied.py"], workers=2, batch=20, epochs=2, options=options
        ) as job:
            assert job.wait() == 0, job.text()
            cls.training = job.summary()
        cls.net = et.load(build(), cls.model)

    def test_validation_in_training_has_the_metrics_of_the_exported_model(self):
        loss, accuracy, _ = expected(self.net)
        last = self.training["evaluations"]["all"][-1]["metrics"]
        self.assertAlmostEqual(last["loss"], loss, places=5)
        self.assertAlmostEqual(last["accuracy"], accuracy, places=9)
        best = self.training["evaluations"]["best"]["value"]
        losses = [each["metrics"]["loss"] for each in self.training["evaluations"]["all"]]
        self.assertEqual((len(losses), min(losses)), (7, best))
        self.assertAlmostEqual(expected(et.load(build(), self.best))[0], best, places=5)

    def test_metrics_are_bit_identical_for_any_workers_and_kills(self):
        found = []
        killed = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        for workers, program in (1, ["run"]), (3, [""]), (3, ["", killed]):
            job = Applied("evaluate", self.folder, self.model, program=program, workers=workers)
            code, output = job.wait()
            self.assertEqual(code, 0, output)
            found.append(job.summary()["metrics"])
        self.assertEqual(len(list(killed.iterdir())), 2)
        self.assertEqual(found, [found[0]] * 3)
        loss, accuracy, _ = expected(self.net)
        self.assertAlmostEqual(found[0]["loss"], loss, places=5)
        self.assertAlmostEqual(found[0]["accuracy"], accuracy, places=9)

    def test_predictions_have_one_row_per_record_in_order(self):
        files = self.folder / "rows"
        options = ["--predictions", files, "--format", "csv"]
        killed = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        job = Applied("predict", self.folder, self.model, *options, program=["", killed])
        code, output = job.wait()
        self.assertEqual(code, 0, output)
        self.assertEqual(len(list(killed.iterdir())), 2)
        rows = []
        for path in sorted(files.iterdir()):
            with open(path, newline="") as file:
                rows += csv.DictReader(file)
        probability, label = expected(self.net)[2]
        self.assertEqual([int(row["class"]) for row in rows], label.tolist())
        self.assertEqual([row["text"] for row in rows], [f"c{i}" for i in label.tolist()])
        worst = max(abs(float(r["probability"]) - p) for r, p in zip(rows, probability.tolist()))
        self.assertLess(worst, 1e-5)

    def test_what_a_program_does_wrong_is_said(self):
        for wrong, said in (
            ("missing", "declare it with job.evaluator(data, function)"),
            ("list", "the evaluator returned a list; it must return a dict"),
            ("length", "the metric loss has 0 values for 1 record; it must be"),
            ("raises", "ValueError: label refused"),
        ):
            job = Applied("evaluate", self.folder, self.model, program=[wrong], workers=1)
            code, output = job.wait()
            self.assertNotEqual(code, 0, output)
            self.assertIn(said, output)
        with RunningJob(
            [HERE / "applied.py", "missing"], options=["--validation-data", "v"], workers=1
        ) as job:
            self.assertNotEqual(job.wait(), 0)
            self.assertIn("declare it with job.evaluator(data, function)", job.text())
        split = ["--training-data", "t", "--validation-split", "0.1"]
        with RunningJob([HERE / "applied.py"], options=split, workers=1) as job:
            self.assertNotEqual(job.wait(), 0)
            self.assertIn("a Python program divides its data itself", job.text())


if __name__ == "__main__":
    unittest.main()
