"""The program that says whether each record counts exactly once finds the mistakes planted here."""

import array
import importlib.util
import json
import pathlib
import struct
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
RECORDS, EPOCHS = 30, 2


def witness():
    """The program, as a module."""
    spec = importlib.util.spec_from_file_location("witness", ROOT / ".bench/witness.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def safetensors(path, tensors, metadata):
    """Writes tensors of one dimension, arrays by name."""
    header, end = {"__metadata__": metadata}, 0
    for name, values in tensors.items():
        size = len(values) * values.itemsize
        kind = {"f": "F32", "I": "U32", "Q": "U64"}[values.typecode]
        header[name] = {"dtype": kind, "shape": [len(values)], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class Witness(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "data").mkdir()
        numbers = array.array("Q", range(RECORDS))
        for file, part in enumerate((numbers[:10], numbers[10:])):
            (self.folder / f"data/{file}.bin").write_bytes(part.tobytes())

    def judge(self, counts=None, touches=None, options=(), **summary):
        """The words that the witness says about a model with these counts, which are exact by
        default, and a summary with these values."""
        exact = dict.fromkeys(range(RECORDS), EPOCHS)
        counts, touches = {**exact, **(counts or {})}, {**exact, **(touches or {})}
        # More than there are records.
        parameters = array.array("f", [counts.get(i, 0) for i in range(RECORDS + 5)])
        model, rows = self.folder / "m.safetensors", self.folder / "rows"
        note = json.dumps({"parts": [{"file": rows.name}]})
        safetensors(model, {"parameters": parameters}, {"elasticdl.tables": note})
        rows_of = {row: count for row, count in touches.items() if count}
        columns = {"ids": array.array("Q", rows_of), "touches": array.array("I", rows_of.values())}
        safetensors(rows, {f"counts.{name}": values for name, values in columns.items()}, {})
        records = {"counted": RECORDS * EPOCHS, "missing": 0, "repeated": 0} | summary
        said = {"state": "completed", "records": {"expected": RECORDS * EPOCHS} | records}
        (self.folder / "summary.json").write_text(json.dumps(said))
        words = (model, "--training-data", self.folder / "data", "--num-epochs", EPOCHS)
        words += ("--summary", self.folder / "summary.json", *options)
        lines, is_wrong = witness().judge([str(word) for word in words])
        self.assertEqual(is_wrong, any(line.startswith("  ") for line in lines))
        return [line.strip() for line in lines if line.startswith("  ")]

    def test_a_job_that_counts_each_record_once_is_exact(self):
        self.assertEqual(self.judge(), [])

    def test_records_that_are_missing_repeated_or_foreign_are_named(self):
        self.assertEqual(
            self.judge({3: 1, 7: 3, 32: 1}),
            [
                "missing: 3 is expected 2 times and counted 1 times",
                "repeated: 7 is expected 2 times and counted 3 times",
                "foreign: 32 is expected 0 times and counted 1 times",
            ],
        )

    def test_the_same_holds_for_rows(self):
        self.assertEqual(
            self.judge(touches={3: 0, 7: 3, 99: 1}),
            [
                "missing: 3 is expected 2 times and counted 0 times",
                "repeated: 7 is expected 2 times and counted 3 times",
                "foreign: 99 is expected 0 times and counted 1 times",
            ],
        )

    def test_a_summary_that_says_otherwise_is_wrong(self):
        for summary in ({"counted": 59, "missing": 1}, {"repeated": 1}, {"expected": 61}):
            self.assertEqual(len(self.judge(**summary)), 1, summary)

    def test_a_model_that_has_to_have_the_bytes_of_another_one_is_compared_with_its_tables(self):
        self.judge()
        other = self.folder / "other"
        other.mkdir()
        for name in ("m.safetensors", "rows"):
            (other / name).write_bytes((self.folder / name).read_bytes())
        options = ("--same-as", other / "m.safetensors")
        self.assertEqual(self.judge(options=options), [])
        for planted in ({"counts": {0: 3}}, {"touches": {0: 3}}):
            self.assertEqual(len(self.judge(options=options, **planted)), 1, planted)


if __name__ == "__main__":
    unittest.main()
