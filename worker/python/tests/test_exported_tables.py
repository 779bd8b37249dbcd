"""Rows of exported tables, read by NumPy, PyTorch and PyArrow, and counted without elasticdl."""

import importlib.util
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest

from jobs import ELASTICDL, HERE, RunningJob, needs_elasticdl

ROOT = HERE.parents[2]
RECORDS, EPOCHS, IDS = 6000, 2, 5000
# Becomes the program of its arguments.
EXECUTE = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


def guide():
    """The reader that the guide shows."""
    text = (ROOT / "worker/src/guide/tables.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    return names["table"]


@needs_elasticdl
class ExportedTables(unittest.TestCase):
    def test_each_touch_of_each_row_is_there_although_workers_were_killed(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        model = pathlib.Path(folder.name) / "m.safetensors"
        options = ("--training-data", f"clicks:0..{RECORDS}", "--export", str(model))
        ctr = pathlib.Path(ELASTICDL).with_name("ctr")
        program = ("-c", EXECUTE, ctr, "--ids", IDS)
        with RunningJob(program, epochs=EPOCHS, options=options, workers=4) as job:
            step = job.wait_for_steps()["step"]
            for seed in range(3):
                # Both copies of a row are lost with workers that are killed before there are others.
                step = job.wait_for("copies", lambda status: status["step"] > step + 10)["step"]
                self.assertTrue(job.kill_any(random.Random(seed)))
            self.assertEqual(job.wait(), 0, job.text())
            self.assertGreaterEqual(job.summary()["workers"]["restarts"], 2, job.text())
        self.witness(model)
        self.read_by_numpy(model)
        self.read_by_pyarrow(model, [ctr, "--ids", str(IDS)])

    def witness(self, model):
        def run(epochs):
            words = (ROOT / ".bench/witness.py", model, "--training-data", f"clicks:0..{RECORDS}")
            command = [sys.executable, *map(str, words), "--ids", str(IDS)]
            return subprocess.run(
                [*command, "--num-epochs", str(epochs)], capture_output=True, text=True, check=False
            )

        done = run(EPOCHS)
        touches = RECORDS * 26 * EPOCHS
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for table in ("wide", "deep"):
            self.assertRegex(done.stdout, f"{table}: .* {touches} expected, {touches} counted")
        self.assertEqual(run(EPOCHS + 1).returncode, 1, "it finds what differs")

    def read_by_numpy(self, model):
        if importlib.util.find_spec("numpy") is None:
            self.skipTest("NumPy is not installed")
        table = guide()
        ids, touches, values = table(str(model), "deep")
        self.assertEqual(values.shape, (len(ids), 16))
        self.assertEqual(int(touches.sum()), RECORDS * 26 * EPOCHS)
        self.assertEqual(len(set(ids.tolist())), len(ids))
        if importlib.util.find_spec("torch") is None:
            self.skipTest("PyTorch is not installed")
        import torch

        embedding = torch.nn.Embedding.from_pretrained(torch.from_numpy(values))
        self.assertEqual(embedding(torch.tensor([3])).tolist(), values[3:4].tolist())

    def read_by_pyarrow(self, model, program):
        if importlib.util.find_spec("pyarrow") is None:
            self.skipTest("PyArrow is not installed")
        import numpy
        import pyarrow
        import pyarrow.parquet

        rows = model.with_name("rows.parquet")
        command = [ELASTICDL, "convert", model, rows, "--", *program]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for table, dim in (("wide", 1), ("deep", 16)):
            found = pyarrow.parquet.read_table(rows / f"{table}.parquet")
            types = [pyarrow.uint64(), pyarrow.uint32(), pyarrow.list_(pyarrow.float32(), dim)]
            self.assertEqual(found.column_names, ["key", "touches", "embedding"])
            for column, expected in zip(found.schema, types, strict=True):
                self.assertTrue(column.type.equals(expected), column)
            matrix = found["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, dim)
            columns = (found["key"].to_numpy(), found["touches"].to_numpy(), matrix)
            for column, expected in zip(columns, guide()(str(model), table), strict=True):
                numpy.testing.assert_array_equal(column, expected)


if __name__ == "__main__":
    unittest.main()
