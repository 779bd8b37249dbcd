"""Streams for PyTorch on the CPU, in the place of those of ``torch.cuda``.

Work is done at once, in the order of the calls. :class:`Checked` reports what a GPU might have done
in another order: two accesses to one memory, of which one writes, on streams that do not wait for
each other. What a stream has seen of the others is known by vector clocks.
"""

import contextlib
import itertools
import threading
import types
from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Stream:
    """A stream; what it enqueues follows what it has seen of each other stream."""

    known = {}

    def __new__(cls, handle=0, device=None):
        if handle not in cls.known:
            stream = cls.known[handle] = super().__new__(cls)
            stream.handle, stream.seen = handle, defaultdict(int)
            if handle:
                stream.wait_stream(default)
        return cls.known[handle]

    def enqueue(self):
        self.seen[self.handle] += 1

    def wait_stream(self, other):
        for handle, count in other.seen.items():
            self.seen[handle] = max(self.seen[handle], count)

    def record_event(self):
        return types.SimpleNamespace(seen=dict(self.seen))

    wait_event = wait_stream

    def synchronize(self):
        for stream in list(Stream.known.values()):
            stream.wait_stream(self)


class Checked(TorchDispatchMode):
    """Checks each operation of the thread that enters it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass, tree_leaves((args, kwargs)))):
            # A tensor that consists of others, which this will see.
            return NotImplemented
        result = function(*args, **kwargs)
        if "c10d" in function.namespace:
            # Not work on this stream.
            return result
        read, written = [], []
        for at, argument in enumerate(function._schema.arguments):
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            if alias is None or alias.is_write:
                (read if alias is None else written).extend(tensors_in(value))
        inputs = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if memory_of(tensor) not in inputs:
                # PyTorch allocates memory again on the stream where it was freed.
                accesses.pop(memory_of(tensor), None)
                written.append(tensor)
        enqueue(current_stream(), str(function), read, written)
        return result


def enqueue(stream, what, read=(), written=()):
    """Notes an access to the memory of tensors, and raises an error if another is not ordered."""
    stream.enqueue()
    for tensors, writes in ((read, False), (written, True)):
        for memory in map(memory_of, tensors):
            for (other, wrote), (count, before) in accesses[memory].items():
                if (writes or wrote) and stream.seen[other] < count:
                    raise RuntimeError(
                        f"{what} on stream {stream.handle:#x} does not wait for {before} on "
                        f"stream {other:#x}"
                    )
            accesses[memory][stream.handle, writes] = stream.seen[stream.handle], what


def tensors_in(value):
    tensors = [leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf)]
    return [tensor for tensor in tensors if tensor.layout == torch.strided]


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


def current_stream(device=None):
    return getattr(current, "stream", default)


def set_stream(stream):
    current.stream = stream


@contextlib.contextmanager
def stream(new):
    before = current_stream()
    set_stream(new)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device=None):
    for each in list(Stream.known.values()):
        each.synchronize()


def keep_alive(net, *inputs):
    """A graph that was made with the default stream, whose nodes for parameters stay and work on
    it, as PyTorch's engine lets them."""

    def before(node):
        def call(gradients):
            outer = current_stream()
            default.wait_stream(outer)
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: outer.wait_stream(default)
            )
            left.append(outer)
            set_stream(default)

        return call

    left = []
    result = net(*inputs)
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in net.parameters()]
    for node in nodes:
        node.register_prehook(before(node))
        node.register_hook(lambda *_: set_stream(left.pop()))
    return result, nodes


def install():
    """Puts these streams in the place of PyTorch's."""
    handles = itertools.count(1)
    torch.cuda.ExternalStream = Stream
    torch.cuda.Stream = lambda device=None: Stream(next(handles))
    torch.cuda.current_stream, torch.cuda.set_stream = current_stream, set_stream
    torch.cuda.default_stream = lambda device=None: default
    torch.cuda.stream, torch.cuda.synchronize = stream, synchronize
    torch.Tensor.record_stream = lambda tensor, stream: None


default = Stream()
current = threading.local()
# By memory, stream, and whether it wrote: the count of the last access, and what it was.
accesses = defaultdict(dict)
