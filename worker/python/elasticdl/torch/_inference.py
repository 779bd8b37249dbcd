"""Evaluation and prediction with a ``torch.nn.Module``."""

import contextlib

import torch
from torch.utils.data import default_collate

from .._worker import Calls
from ._module import tensor_of


class Batches:
    """The micro-batches of a data set to which a function is applied."""

    def __init__(self, job, dataset, collate, ids=None):
        """``ids(batch)``: the ids of a micro-batch, for a job with tables."""
        self._job = job
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate
        self._ids = ids
        # Those whose ids are known, until the rows are there.
        self._loaded = {}

    def features(self, indices):
        """The ids of a micro-batch, as the core takes them."""
        batch = self._loaded[tuple(indices)] = self._load(indices)
        return self._job._rows.features(self._ids, batch, len(indices))

    def call(self, function, indices):
        """Calls a function with a micro-batch, in evaluation mode, without gradients."""
        batch = self._loaded.pop(tuple(indices), None)
        if batch is None:
            batch = self._load(indices)
        arguments = batch if isinstance(batch, (list, tuple)) else (batch,)
        rows = self._job._rows.evaluated()
        with torch.no_grad(), evaluation_mode(self._job._net), rows:
            return function(*arguments)

    def _load(self, indices):
        return self._collate([self._dataset[index] for index in indices])


@contextlib.contextmanager
def evaluation_mode(net):
    """Sets the module and its parts to evaluation mode, and back as each of them was."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class Applied:
    """A module whose parameters and buffers are those of the job's model, and are not trained."""

    def __init__(self, job, parameters, buffers):
        self._job = job
        self._parameters = parameters
        self._buffers = buffers

    def begin(self):
        """Moves the parameters to the memory that the model's values are copied to, on the CPU."""
        job = self._job
        buffers = [(entry[0], tensor_of(entry)) for entry in self._buffers]
        order = buffers + self._parameters
        tensors = [(name, list(tensor.shape)) for name, tensor in order]
        calls = Calls(initialize=_nothing, update=_nothing, load=self._load)
        tables = job._rows.declared()
        job._worker.start(tensors, 0, calls, is_direct=True, tables=tables)
        self._values = torch.frombuffer(job._worker.started.parameters, dtype=torch.float32)
        self._elsewhere = []
        at = 0
        with torch.no_grad():
            for _, tensor in order:
                value = self._values[at : at + tensor.numel()].view(tensor.shape)
                if isinstance(tensor, torch.nn.Parameter):
                    if tensor.device.type == "cpu":
                        value.copy_(tensor)
                        tensor.data = value
                    else:
                        self._elsewhere.append((tensor, value))
                at += tensor.numel()

    @torch.no_grad()
    def _load(self, trains):
        del trains
        set_buffers(self._buffers, self._values)
        # The values are the same for the whole job.
        for tensor, value in self._elsewhere:
            tensor.copy_(value)
        self._elsewhere.clear()


def set_buffers(buffers, values):
    """Copies the first values to the buffers, in their order. Elements that f32 represents by these
    values stay as they are."""
    at = 0
    with torch.no_grad():
        for buffer in map(tensor_of, buffers):
            part = values[at : at + buffer.numel()].view(buffer.shape)
            exact = (part if buffer.is_floating_point() else part.round()).to(buffer.dtype)
            buffer.copy_(torch.where(part == buffer.float(), buffer, exact))
            at += buffer.numel()


def _nothing(*arguments):
    """For a model that is not trained."""
