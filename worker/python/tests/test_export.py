"""Tests of exported models and of the project that `elasticdl zoo init --python` writes."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

import torch

import elasticdl.torch as et
from elasticdl.torch._weights import read
from export import Net
from jobs import ELASTICDL, HERE, RunningJob, needs_elasticdl


CAPTURED = {"capture_output": True, "text": True, "check": False}


def safetensors(tensors, **changes):
    """A file of these tensors, with changes to the entry of each."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        offsets = [len(data), len(data) + len(raw)]
        entry = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        header[name] = {**entry, **changes}
        data += raw
    text = json.dumps({"__metadata__": {"a": "b"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + data


class Load(unittest.TestCase):
    """Files of exported models."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "model"

    def test_a_file_is_loaded_by_names(self):
        net = torch.nn.Linear(3, 2)
        values = {"bias": torch.randn(2), "weight": torch.randn(2, 3)}
        self.path.write_bytes(safetensors(values))
        self.assertIs(et.load(net, self.path), net)
        for name, value in net.state_dict().items():
            self.assertTrue(torch.equal(value, values[name]))

    def test_a_file_that_does_not_fit_is_refused(self):
        fits = {"bias": torch.randn(2), "weight": torch.randn(2, 3)}
        whole = safetensors(fits)
        for data, expected in (
            (b"", "its header is incomplete"),
            (b"\xff" * 40, "its header is incomplete"),
            (whole[:-1], "is damaged: the data of weight is not in it"),
            ((3).to_bytes(8, "little") + b"{]}", "is no safetensors file of f32"),
            ((2).to_bytes(8, "little") + b"[]", "is no safetensors file of f32"),
            (safetensors(fits, dtype="I64"), "a tensor is of I64"),
            (safetensors(fits, shape=[-2, -3]), "is damaged"),
            (safetensors(fits, data_offsets=[-8, 0]), "is damaged"),
            (safetensors({"weight": fits["weight"]}), "has no tensor bias; it has weight"),
            (
                safetensors({**fits, "bias": torch.randn(3)}),
                r"bias has the shape \[3\], expected \[2\]",
            ),
        ):
            self.path.write_bytes(data)
            before = torch.nn.Linear(3, 2)
            net = torch.nn.Linear(3, 2)
            net.load_state_dict(before.state_dict())
            with self.assertRaisesRegex(ValueError, expected):
                et.load(net, self.path)
            for name, value in net.state_dict().items():
                self.assertTrue(torch.equal(value, before.state_dict()[name]), name)


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Jobs that export their model."""

    def test_an_export_and_a_converted_checkpoint_have_what_the_state_dict_has(self):
        program = [sys.executable, HERE / "export.py"]
        with tempfile.TemporaryDirectory() as folder:
            path, converted = f"{folder}/model.safetensors", f"{folder}/converted"
            options = ["--export", path, "--checkpoint-dir", f"{folder}/checkpoints"]
            with RunningJob(
                [HERE / "export.py", "{job}/saved"], workers=2, batch=12, options=options
            ) as job:
                self.assertEqual(job.wait(), 0, job.text())
                saved = torch.load(job.path / "saved")
            exported = read(path)
            # Tied tensors are there once, and buffers that are not saved are there, too.
            names = {name for name, value in saved.items() if value.numel()} - {"head.weight"}
            self.assertEqual(set(exported), names | {"secret"})
            net = et.load(Net(), path)
            self.assertIs(net.head.weight, net.embed.weight)
            for name, value in net.state_dict().items():
                self.assertEqual((value.dtype, value.shape), (saved[name].dtype, saved[name].shape))
                self.assertTrue(torch.equal(value, saved[name]), name)
            self.assertFalse(torch.equal(net.embed.weight, Net().embed.weight))
            checkpoint = max(pathlib.Path(folder, "checkpoints").glob("step-*"))
            command = [ELASTICDL, "convert", checkpoint, converted, "--", *program, "unused"]
            ended = subprocess.run(command, **CAPTURED)
            self.assertEqual(ended.returncode, 0, ended.stderr)
            found = read(converted)
            self.assertEqual(list(found), list(exported))
            for name, value in exported.items():
                self.assertTrue(torch.equal(found[name], value), name)
            command[2] = f"{folder}/none"
            ended = subprocess.run(command, **CAPTURED)
            self.assertNotEqual(ended.returncode, 0)
            self.assertIn("the checkpoint was not converted", ended.stderr)

    def test_a_new_project_trains_and_evaluates(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "my-line"
            subprocess.run([ELASTICDL, "zoo", "init", "--python", path], check=True)
            files = [file for file in path.rglob("*") if file.is_file()]
            names = {str(file.relative_to(path)) for file in files}
            texts = {".dockerignore", "Dockerfile", "README.md"}
            programs = {"evaluate.py", "model.py", "train.py", "data/points.csv"}
            self.assertEqual(names, {".gitignore", *texts, *programs})
            points = ["--data", path / "data/points.csv"]
            model = path / "my-line.safetensors"
            # As the project's README says.
            options = ["--export", str(model)]
            with RunningJob(
                [path / "train.py", *points], workers=2, batch=20, epochs=20, options=options
            ) as job:
                self.assertEqual(job.wait(), 0, job.text())
                logs = "".join(file.read_text() for file in (job.directory / "logs").iterdir())
                self.assertRegex(logs, r"y = (1\.99|2\.0[01]) x - 0\.(49|5[01])\n")
            predictions = path / "predictions.csv"
            ended = self.run_alone(
                path, "evaluate.py", model, *points, "--predictions", predictions
            )
            self.assertEqual(ended.returncode, 0, ended.stderr)
            self.assertLess(float(ended.stdout.split()[1]), 0.002)
            self.assertEqual(len(predictions.read_text().splitlines()), 401)
            words = [ELASTICDL, "evaluate", "--local", "--model", model, *points]
            words += ["--summary", path / "summary.json", "--", sys.executable, path / "train.py"]
            applied = subprocess.run(words, **CAPTURED, cwd=folder)
            self.assertEqual(applied.returncode, 0, applied.stderr)
            summary = json.loads((path / "summary.json").read_text())
            self.assertAlmostEqual(
                summary["metrics"]["loss"], float(ended.stdout.split()[1]), places=5
            )
            ended = self.run_alone(path, "train.py", *points)
            self.assertIn("y = ", ended.stdout, ended.stderr)
            # Nothing is overwritten.
            again = subprocess.run([ELASTICDL, "zoo", "init", "--python", path], **CAPTURED)
            self.assertEqual(again.returncode, 2, again.stderr)
            self.assertIn("train.py", again.stderr)

    @staticmethod
    def run_alone(path, program, *arguments):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ELASTICDL_")}
        command = [sys.executable, path / program, *arguments]
        return subprocess.run(command, **CAPTURED, env=environment)


if __name__ == "__main__":
    unittest.main()
