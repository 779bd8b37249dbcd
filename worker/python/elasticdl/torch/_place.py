"""Where a module and its state are: in the memory of the host, or of a GPU.

On a GPU, the program's thread enqueues its work on the stream of the trainer. So both work in the
order of their calls, and neither waits for the other. PyTorch owns the memory.
"""

import ctypes
import dataclasses

import torch

from .. import _elasticdl


def place_of(net):
    """The place of a module, whose parameters and buffers are in one memory."""
    device = next(net.parameters()).device
    return OnGpu(device) if device.type == "cuda" else OnHost()


def is_known(device):
    """Whether modules can be trained there."""
    return device.type in ("cpu", "cuda")


class OnHost:
    """The memory of the host: the extension module's, which the trainer uses as well."""

    device = torch.device("cpu")
    # How the trainer works on a GPU.
    on_gpu = None

    def allocate(self, parameters, slots):
        """The trainer allocates it."""

    def bind(self, memory):
        """Returns the parameters and the state, with the memory of the trainer."""
        return _tensor(memory.parameters), _tensor(memory.state)

    def flats(self):
        """Gradients of the trainer by address; others are found as they come."""
        return {}

    def flat(self, address, length):
        """The array of the trainer at an address of the host."""
        return at_address(address, length)

    def mirror(self, memory):
        """Memory of the host in the place of a part of the state."""
        return Mirror(memory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Memory for the trainer, by address. ``owner`` keeps it."""

    gpu: _elasticdl.Gpu
    parameters: int
    state: int
    gradients: list[int]
    owner: object


class OnGpu:
    """The memory of a GPU, which PyTorch allocates.

    The trainer finds the NVRTC and the NCCL that PyTorch has loaded by their names.
    """

    def __init__(self, device):
        self.device = device
        self._gpu = _elasticdl.Gpu(device.index)
        # What the program has enqueued so far is on another stream.
        torch.cuda.synchronize(device)
        torch.cuda.set_stream(torch.cuda.ExternalStream(self._gpu.stream, device))

    def allocate(self, parameters, slots):
        """Allocates the parameters, the state, and two gradients."""
        self._parameters = self.zeros(parameters)
        self._state = self.zeros(max(1, parameters * slots))
        self._gradients = [self.zeros(parameters) for _ in range(2)]
        self.on_gpu = GpuMemory(
            gpu=self._gpu,
            parameters=self._parameters.data_ptr(),
            state=self._state.data_ptr(),
            gradients=[gradient.data_ptr() for gradient in self._gradients],
            owner=self,
        )

    def zeros(self, length):
        """An array of zeros."""
        return torch.zeros(length, device=self.device)

    def bind(self, memory):
        """Returns the parameters and the state."""
        return self._parameters, self._state

    def flats(self):
        """Gradients of the trainer by address."""
        return {gradient.data_ptr(): gradient for gradient in self._gradients}

    def flat(self, address, length):
        """All arrays of the trainer are known."""
        raise RuntimeError(f"the trainer has no gradient at address {address:#x}")

    def mirror(self, memory):
        """Memory of the host that is copied to a part of the state."""
        return PinnedMirror(memory)


class Mirror:
    """A part of the state that is on the host."""

    def __init__(self, memory):
        self.host = memory

    def begin(self):
        """The host will write."""

    def push(self):
        """The host has written."""

    def pull(self):
        """The host will read."""


class PinnedMirror:
    """A part of the state on a GPU, with a copy on the host."""

    def __init__(self, memory):
        self._memory = memory
        self.host = torch.zeros(len(memory), dtype=memory.dtype, pin_memory=True)
        self._copied = torch.cuda.Event()

    def begin(self):
        """The last copy to the GPU is complete since long: a sum has followed it."""
        self._copied.synchronize()

    def push(self):
        """Copies what the host has written, in the order of the stream."""
        self._memory.copy_(self.host, non_blocking=True)
        self._copied.record()

    def pull(self):
        """Waits for the GPU, and copies from it."""
        self.host.copy_(self._memory)


def at_address(address, length):
    """An array of f32 on the host."""
    memory = (ctypes.c_float * length).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32)


def _tensor(floats):
    return torch.frombuffer(floats, dtype=torch.float32) if len(floats) else torch.empty(0)
