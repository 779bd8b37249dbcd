"""Evaluation and prediction with a ``torch.nn.Module``."""

import contextlib

import torch
from torch.utils.data import default_collate

from .._worker import Calls


def caller(job, dataset, collate):
    """Calls a function with a micro-batch of a data set, in evaluation mode, without gradients."""
    collate = default_collate if collate is None else collate

    def call(function, indices):
        batch = collate([dataset[index] for index in indices])
        arguments = batch if isinstance(batch, (list, tuple)) else (batch,)
        with torch.no_grad(), evaluation_mode(job._net):
            return function(*arguments)

    return call


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

    def __init__(self, job, order, buffers):
        self._job = job
        self._order = order
        self._buffers = buffers

    def begin(self):
        """Moves the parameters to the memory that the model's values are copied to, on the CPU."""
        job = self._job
        tensors = [(name, list(tensor.shape)) for name, tensor in self._order]
        calls = Calls(initialize=_nothing, update=_nothing, load=self._load)
        job._worker.start(tensors, 0, calls, is_direct=True)
        self._values = torch.frombuffer(job._worker.started.parameters, dtype=torch.float32)
        self._elsewhere = []
        at = 0
        with torch.no_grad():
            for _, tensor in self._order:
                value = self._values[at : at + tensor.numel()].view(tensor.shape)
                if isinstance(tensor, torch.nn.Parameter):
                    if tensor.device.type == "cpu":
                        value.copy_(tensor)
                        tensor.data = value
                    else:
                        self._elsewhere.append((tensor, value))
                at += tensor.numel()

    @torch.no_grad()
    def _load(self):
        set_buffers(self._buffers, self._values)
        # The values are the same for the whole job.
        for tensor, value in self._elsewhere:
            tensor.copy_(value)
        self._elsewhere.clear()


def set_buffers(buffers, values):
    """Copies the first values to the buffers, in their order."""
    at = 0
    with torch.no_grad():
        for _, buffer in buffers:
            part = values[at : at + buffer.numel()].view(buffer.shape)
            buffer.copy_(part if buffer.is_floating_point() else part.round())
            at += buffer.numel()


def _nothing(*arguments):
    """For a model that is not trained."""
