"""Runs a program as if its tensors were in the memory of a GPU: ``on_fake_gpu.py PROGRAM ARG...``.

The CUDA driver, NVRTC and NCCL are the fakes of ``collective/stand-ins``, whose GPUs have memory of
the host. They are the trainer's side, which runs as it does on a GPU. PyTorch for the CPU is the
program's side: where it would enqueue work on the trainer's stream, it waits for the stream first.
PyTorch's own streams are those of ``fake_streams.py``. What only a GPU shows is PyTorch's own work.
"""

import atexit
import ctypes
import dataclasses
import runpy
import sys
import types

import fake_streams
import torch

from elasticdl import _elasticdl, _process, _worker
from elasticdl.torch import _place, _state, _training


class FakeGpu(_place.OnGpu):
    """A place whose memory PyTorch takes for that of the host."""

    def __init__(self, device):
        super().__init__(device)
        Synchronized.place = self

    def pinned(self, memory):
        return FakeMirror(memory)


class FakeMirror(_place.PinnedMirror):
    def __init__(self, memory):
        self._memory = memory
        self.host = torch.zeros(len(memory), dtype=memory.dtype)
        self._copied = self

    def synchronize(self):
        synchronize()

    def record(self):
        pass


class Synchronized:
    """A worker, for a program that works with memory of the trainer at once."""

    place = None

    def __init__(self, core):
        self._core = core

    def __getattr__(self, name):
        return getattr(self._core, name)

    def start(self, *, calls, **arguments):
        names = [field.name for field in dataclasses.fields(calls)]
        waiting = {name: self.after(name, getattr(calls, name)) for name in names}
        return self._core.start(calls=types.SimpleNamespace(**waiting), **arguments)

    def counted(self):
        synchronize()
        return self._core.counted()

    def complete_from(self, start):
        self.access("a sum of buckets", read=self.place._gradients)
        self._core.complete_from(start)

    def deliver(self, *arguments):
        if self.place is not None:
            self.access("a sum", read=self.place._gradients)
        return self._core.deliver(*arguments)

    def access(self, what, **memory):
        """What the trainer does on its stream."""
        fake_streams.enqueue(self.place._stream, what, **memory)

    def after(self, name, callback):
        def call(*arguments):
            synchronize()
            if self.place is not None:
                self.access(f"what precedes {name}()", written=[self.place._parameters])
            return callback(*arguments)

        return call

    @staticmethod
    def join():
        core = _elasticdl.Core.join()
        return None if core is None else Synchronized(core)

    @staticmethod
    def alone(*arguments):
        return Synchronized(_elasticdl.Core.alone(*arguments))


def synchronize():
    if Synchronized.place is not None:
        code = driver.cuStreamSynchronize(ctypes.c_void_p(Synchronized.place._gpu.stream))
        assert code == 0, code


driver = ctypes.CDLL("libcuda.so")
assert driver.fakeBytesCopied, "this is not the fake driver"
fake_streams.install()
_place._elasticdl.Gpu = lambda _, open=_elasticdl.Gpu: open(_elasticdl.gpu_ordinal())
_training.place_of = lambda net: FakeGpu(next(net.parameters()).device)
# So that tensors of the CPU are on the module's device, and numbers alone are on the host.
_state._HOST = torch.device("meta")
names = {name: getattr(_elasticdl, name) for name in dir(_elasticdl)}
_process._elasticdl = _worker._elasticdl = types.SimpleNamespace(**{**names, "Core": Synchronized})
sys.argv = sys.argv[1:]
code = 0
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as error:
    code = error.code or 0
# What runs at the end of Python, and then at that of the process. Python's own end lies between,
# which takes seconds with PyTorch on a busy machine.
atexit._run_exitfuncs()
sys.stderr.flush()
ctypes.CDLL(None).exit(code)
