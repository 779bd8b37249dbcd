"""Where a module and its state are: in the memory of the host, or of a GPU.

On a GPU, this package enqueues its work on the stream of the trainer. So both work in the order of
their calls, and neither waits for the other. The program may enqueue its own on other streams:
those are ordered with the trainer's at each call. PyTorch owns the memory.
"""

import contextlib
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

    def allocate(self, parameters, state, *, is_divided):
        """The trainer allocates it."""

    def bind(self, memory):
        """Returns the parameters and the state, with the memory of the trainer."""
        return _tensor(memory.parameters), _tensor(memory.state)

    def updated(self, memory, values):
        """The parameters that chunks update: the same."""
        return values

    def flats(self):
        """Gradients of the trainer by address; others are found as they come."""
        return {}

    def flat(self, address, length):
        """The array of the trainer at an address of the host."""
        return at_address(address, length)

    def mirror(self, memory):
        """Memory of the host in the place of a part of the state."""
        return Mirror(memory)

    def on_stream(self, used=None):
        """There are no streams."""
        return _HERE

    def synchronize(self):
        """There are no streams."""


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
        self._stream = torch.cuda.ExternalStream(self._gpu.stream, device)
        # The program's own choice stays.
        if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
            torch.cuda.set_stream(self._stream)

    def allocate(self, parameters, state, *, is_divided):
        """Allocates the parameters, the state, and two gradients. ``is_divided``: the optimizer's
        state is divided over the workers; then it is on the host, where the gradient is summed and
        the parameters are updated, and there is one gradient here."""
        self._is_divided = is_divided
        self._parameters = self.zeros(parameters)
        self._state = self.zeros(1 if is_divided else max(1, state))
        self._gradients = [self.zeros(parameters) for _ in range(1 if is_divided else 2)]
        first, last = self._gradients[0], self._gradients[-1]
        self.on_gpu = GpuMemory(
            gpu=self._gpu,
            parameters=self._parameters.data_ptr(),
            state=self._state.data_ptr(),
            gradients=[first.data_ptr(), last.data_ptr()],
            owner=self,
        )

    def zeros(self, length):
        """An array of zeros."""
        return torch.zeros(length, device=self.device)

    def bind(self, memory):
        """Returns the parameters and the state."""
        return self._parameters, _tensor(memory.state) if self._is_divided else self._state

    def updated(self, memory, values):
        """The parameters that chunks update, from which the trainer copies to those on the GPU."""
        return _tensor(memory.parameters)

    def flats(self):
        """Gradients of the trainer by address."""
        return {gradient.data_ptr(): gradient for gradient in self._gradients}

    def flat(self, address, length):
        """All arrays of the trainer are known."""
        raise RuntimeError(f"the trainer has no gradient at address {address:#x}")

    def mirror(self, memory):
        """Memory of the host that is copied to a part of the state."""
        return Mirror(memory) if self._is_divided else self.pinned(memory)

    def pinned(self, memory):
        """Memory of the host in the place of a part of the state on the GPU."""
        return PinnedMirror(memory)

    def on_stream(self, used=None):
        """A context in which work is enqueued on the trainer's stream: after the work on the stream
        that is current, whose later work follows. Another stream than the trainer's is current in a
        program's ``with torch.cuda.stream()``, on another thread than that of the first draw, and
        in a backward pass through a graph that was made before. ``used``: a tensor that was
        allocated on the current stream and may be freed later.
        """
        current = torch.cuda.current_stream(self.device)
        return _HERE if current == self._stream else self._between(current, used)

    @contextlib.contextmanager
    def _between(self, current, used):
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
            if used is not None and not used.is_sparse:
                used.record_stream(self._stream)

    def synchronize(self):
        """Waits for the trainer's stream, so that work on any stream may follow."""
        self._stream.synchronize()


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


_HERE = contextlib.nullcontext()
