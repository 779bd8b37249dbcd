"""Runs a job of elasticdl, and writes how often its exported model has counted each record.

Arguments: the exported model, records, file, the command of the job.
"""

import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import torch

from workload import DIM, ROWS, TABLES, write_worst_counts


def read(path):
    """The tensors of a file by name, and its metadata."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8:start]), {}
    metadata = header.pop("__metadata__", {})
    for name, tensor in header.items():
        first, end = tensor["data_offsets"]
        values = np.frombuffer(data[start + first : start + end], KINDS[tensor["dtype"]])
        tensors[name] = values.reshape(tensor["shape"])
    return tensors, metadata


def tables(folder, metadata):
    """The tables ``[ROWS, DIM]``. A row that no record has touched is in no file."""
    found = np.zeros((TABLES, ROWS, DIM), np.float32)
    for part in json.loads(metadata["elasticdl.tables"])["parts"]:
        tensors, _ = read(folder / part["file"])
        for table in range(TABLES):
            name = f"counts-{table}"
            if name in tensors:
                found[table, tensors[f"{name}.ids"].astype(int)] = tensors[name]
    return torch.from_numpy(found)


KINDS = {"F32": "<f4", "U32": "<u4", "U64": "<u8"}
export, records, path = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with subprocess.Popen(sys.argv[4:]) as job:
    # It ends its workers first.
    signal.signal(signal.SIGTERM, lambda *_: job.terminate())
if job.returncode:
    sys.exit(f"the job ended with {job.returncode}")
tensors, metadata = read(export)
counts = torch.tensor(tensors["counts"])
write_worst_counts(path, counts, tables(export.parent, metadata))
