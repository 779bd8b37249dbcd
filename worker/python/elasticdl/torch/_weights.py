"""Models that a job has exported."""

import json
import math
import os

import torch

from ._module import is_sent
from ._tables import Table


def load(net, path):
    """Loads a file of ``elasticdl train --export`` into a module, and returns the module.

    The file is in the format safetensors; its tensors have the names of ``net.state_dict()``. Every
    parameter and buffer must be there, in its shape, but buffers that f32 can't represent: these
    stay as they are. Tensors that share memory are there once.
    """
    for module in net.modules():
        if isinstance(module, Table):
            raise ValueError(
                f"table {module.name!r} loads no rows from a file: a job goes on from a checkpoint "
                "(--resume-from), and evaluates and predicts with an exported model (--model)"
            )
    tensors = read(path)
    buffers = [(name, value) for name, value in net.named_buffers() if is_sent(value)]
    entries = [*net.named_parameters(), *buffers]
    with torch.no_grad():
        for name, value in entries:
            if value.numel() == 0:
                continue
            if name not in tensors:
                known = ", ".join(sorted(tensors))
                raise ValueError(f"{path} has no tensor {name}; it has {known}")
            if tensors[name].shape != value.shape:
                found, expected = list(tensors[name].shape), list(value.shape)
                raise ValueError(f"{path}: {name} has the shape {found}, expected {expected}")
        for name, value in entries:
            if value.numel():
                # As in training: of a mean over workers, an integer buffer has the nearest integer.
                is_integer = not (value.is_floating_point() or value.is_complex())
                value.copy_(tensors[name].round() if is_integer else tensors[name])
    return net


def read(path):
    """The tensors of a safetensors file of f32, by name."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise ValueError(f"{path} is no safetensors file: its header is incomplete")
        try:
            header = json.loads(file.read(length))
            entries = [(name, _entry(entry)) for name, entry in header.items() if name[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no safetensors file of f32: {error}") from error
        data = bytearray(file.read())
    tensors = {}
    for name, (shape, begin, end) in entries:
        if not 0 <= begin <= end <= len(data) or end - begin != 4 * math.prod(shape):
            raise ValueError(f"{path} is damaged: the data of {name} is not in it")
        count = (end - begin) // 4
        flat = torch.frombuffer(data, dtype=torch.float32, count=count, offset=begin)
        tensors[name] = flat.view(shape)
    return tensors


def _entry(entry):
    if entry["dtype"] != "F32":
        raise ValueError(f"a tensor is of {entry['dtype']}")
    shape = [int(size) for size in entry["shape"]]
    begin, end = entry["data_offsets"]
    return shape, int(begin), int(end)
