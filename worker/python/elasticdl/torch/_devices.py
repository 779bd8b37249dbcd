"""Where the tensors of a collective operation are: on the host, or on a GPU.

::

    caller                          thread of the group, on a stream of its own
      its stream ──► event   ──►      copy to page-locked memory, operation there, copy back
      wait()                 ◄──      the copies are complete

An operation on tensors of a GPU works with copies of them on the host, or goes over NCCL:
:mod:`._nccl`. It follows the work that was on the caller's stream when it was begun. It is done when its results are on the GPU, so work on any
stream may follow ``wait()``, and the memory of the tensors may be freed. If it fails, the tensors
are as before.
"""

import atexit
import functools

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .. import _elasticdl


class Devices:
    """The devices of the tensors of a process group."""

    def __init__(self):
        self._gpus = {}

    def of(self, *tensors):
        """The device of tensors, and of those in lists of them: :class:`OnHost` or :class:`OnGpu`.

        Raises ValueError if they are on several devices.
        """
        gpu = gpu_of(tree_leaves(tensors))
        if gpu is None:
            return OnHost()
        if gpu not in self._gpus:
            self._gpus[gpu] = OnGpu(gpu)
        return self._gpus[gpu]

    def used(self):
        """The GPUs that have been used."""
        return list(self._gpus.values())


class OnHost:
    """Operations use the tensors themselves."""

    @staticmethod
    def new_future():
        """A future of tensors of this device."""
        return torch.futures.Future()

    @staticmethod
    def begin(act, given, taken, direct=None):
        """Returns a function that lets ``act(given, taken)`` read the tensors of ``given`` and
        replace those of ``taken``. ``direct(gpu)`` does so on a GPU, if it returns true."""
        return torch.no_grad()(functools.partial(act, given, taken))


class OnGpu:
    """Operations use copies on the host, unless they go over NCCL."""

    def __init__(self, device):
        self._device = device
        self._gpu = _elasticdl.Gpu(device.index)
        self._stream = torch.cuda.ExternalStream(self._gpu.stream, device)

    def new_future(self):
        """As :meth:`OnHost.new_future`."""
        return torch.futures.Future(devices=[self._device])

    def begin(self, act, given, taken, direct=lambda gpu: False):
        """As :meth:`OnHost.begin`, for another thread, after what is on the current stream."""
        ready = torch.cuda.current_stream(self._device).record_event()

        @torch.no_grad()
        def run():
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                if not direct(self._gpu):
                    self._on_host(act, given, taken)
                self._stream.synchronize()

        return run

    def _on_host(self, act, given, taken):
        read, written = ({id(t): t for t in tree_leaves(each)} for each in (given, taken))
        on_host = {at: _pinned(tensor) for at, tensor in (read | written).items()}
        for at, tensor in read.items():
            _copy(on_host[at], tensor)
        self._stream.synchronize()
        act(*tree_map(lambda tensor: on_host[id(tensor)], (given, taken)))
        for at, tensor in written.items():
            _copy(tensor, on_host[at])


def gpu_of(tensors):
    """The GPU of dense tensors that are on one."""
    devices = {tensor.device for tensor in tensors if tensor.layout == torch.strided}
    if all(device.type != "cuda" for device in devices):
        return None
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the tensors of one operation are on several devices: {names}")
    return devices.pop()


def _pinned(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _copy(into, tensor):
    into.copy_(tensor, non_blocking=True)


# Called after the ends of all groups, which are registered later.
atexit.register(_elasticdl.end_nccl)
