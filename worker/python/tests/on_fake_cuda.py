"""Runs a program as if the tensors that it gives to ``torch.distributed`` were on a GPU:
``on_fake_cuda.py PROGRAM ARG...``. With ``FAKE_CUDA=some``, those of about half of the operations.

They are tensors of PyTorch for the CPU. The driver and NCCL are the fakes of
``collective/stand-ins``, whose devices have memory of the host. Streams are those of
``fake_streams.py``, which check the order of what is done on them. Copies to and from page-locked
memory are made as late as possible: when their stream is synchronized. Memory of the GPU is refused
where that of the host is needed.
"""

import atexit
import ctypes
import os
import random
import runpy
import sys
import threading
import weakref

import fake_streams
import torch

from elasticdl.torch import _collectives, _devices, _nccl

# Tensors on the GPU, by memory.
on_gpu = weakref.WeakValueDictionary()
waiting = threading.local()
draw = random.Random(1)
counts = [0, 0]
calls = []


def gpu_of(tensors, real=_devices.gpu_of):
    """The fake GPU."""
    tensors = [tensor for tensor in tensors if tensor.layout == torch.strided]
    is_on_gpu = os.environ.get("FAKE_CUDA") != "some" or draw.random() < 0.5
    counts[is_on_gpu] += bool(tensors)
    for tensor in tensors:
        on_gpu.pop(fake_streams.memory_of(tensor), None)
        if is_on_gpu:
            on_gpu[fake_streams.memory_of(tensor)] = tensor
    return GPU if is_on_gpu and tensors else real(tensors)


def copy(into, tensor):
    stream = fake_streams.current_stream()
    fake_streams.enqueue(stream, "a copy", read=[tensor], written=[into])
    waiting.__dict__.setdefault("copies", []).append((into, tensor))


def synchronize(stream, real=fake_streams.Stream.synchronize):
    """Does what is on the stream of this thread."""
    for into, tensor in waiting.__dict__.pop("copies", []):
        # As on a GPU: neither the version nor the graph of tensors matters.
        into.detach().copy_(tensor.detach())
    real(stream)


def memory(tensor, *kind, real=_collectives._memory):
    other = on_gpu.get(fake_streams.memory_of(tensor))
    assert other is None or not tensor.numel(), "the host has no access to memory of a GPU"
    return real(tensor, *kind)


def call(ring, size, kind, *arguments, real=_nccl._call):
    calls.append(kind)
    real(ring, size, kind, *arguments)


GPU = torch.device("cuda", int(os.environ["RANK"]))
fake_streams.install()
fake_streams.Stream.synchronize = synchronize
_devices.OnGpu.new_future = lambda _: torch.futures.Future()
_devices.gpu_of, _devices._copy = gpu_of, copy
_collectives._memory, _nccl._call = memory, call
_devices._pinned = lambda tensor: torch.full_like(tensor, 77, memory_format=torch.contiguous_format)
sys.argv = sys.argv[1:]
fake_streams.set_stream(torch.cuda.Stream())
with fake_streams.Checked():
    runpy.run_path(sys.argv[0], run_name="__main__")
assert counts[1] > 10, counts
kinds = {"all_gather", "all_reduce", "broadcast", "reduce_scatter"}
assert set(calls) == (set() if os.environ["ELASTICDL_NCCL"] == "off" else kinds), set(calls)
# What runs at the end of Python, and then at that of the process. Python's own end lies between,
# which takes seconds with PyTorch on a busy machine.
atexit._run_exitfuncs()
sys.stdout.flush()
ctypes.CDLL(None).exit(0)
