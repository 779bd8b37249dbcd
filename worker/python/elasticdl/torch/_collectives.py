"""The collective operations of :mod:`elasticdl.torch.distributed`."""

import ctypes
import functools

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp

from . import _nccl
from ._devices import OnHost
from ._nccl import as_summed, kind_of


class Collectives:
    """Operations on the ring of a rank, one after the other, in a thread of their own.

    A class that has them has the attributes ``_ring``, ``_limit`` (seconds), ``_devices`` and
    ``_point_to_point``, and the methods ``rank()`` and ``size()``.
    """

    # ---- operations ----

    def allreduce(self, tensors, opts):
        """Reduces each tensor over all ranks, in place."""
        device = self._devices.of(tensors)
        if kind_of(opts.reduceOp) == ReduceOp.SUM and _is_one_plain(device, tensors):
            begin = functools.partial(self._ring.begin_all_reduce, _memory(tensors[0], "f"))
            return self._submit(opts, device, tensors, begin)

        def act(_, tensors):
            for tensor in tensors:
                _check(tensor)
                self._reduce(tensor, opts.reduceOp)

        def over_nccl():
            _nccl.all_reduce(self._ring, self.size(), tensors, opts.reduceOp)

        is_sum = _nccl.sums(tensors, opts.reduceOp)
        return self._call(opts, tensors, tensors, act, over_nccl if is_sum else None)

    def allreduce_coalesced(self, tensors, opts):
        """As :meth:`allreduce`."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors, opts):
        """Reduces each tensor over all ranks to that of the root."""

        def act(tensors, outputs):
            results = [tensor.clone() for tensor in tensors]
            for result in results:
                _check(result)
                self._reduce(result, opts.reduceOp)
            _copy_all(outputs, results[: len(outputs)])

        return self._call(opts, tensors, tensors if self._is_root(opts) else [], act)

    def broadcast(self, tensors, opts):
        """Replaces each tensor by that of the root."""
        device = self._devices.of(tensors)
        if _is_one_plain(device, tensors):
            memory = _memory(tensors[0])
            begin = functools.partial(self._ring.begin_broadcast, opts.rootRank, memory)
            return self._submit(opts, device, tensors, begin)

        def act(given, taken):
            for tensor in (*given, *taken):
                _check(tensor)
                flat = tensor.contiguous()
                self._ring.broadcast(opts.rootRank, _memory(flat))
                if flat is not tensor:
                    tensor.copy_(flat)

        roles = (tensors, []) if self._is_root(opts) else ([], tensors)
        over_nccl = functools.partial(
            _nccl.broadcast, self._ring, self.size(), opts.rootRank, *roles
        )
        return self._call(opts, *roles, act, over_nccl)

    def allgather(self, outputs, inputs, opts):
        """Gathers each input of all ranks into a list of outputs."""

        def act(inputs, outputs):
            for into, tensor in zip(outputs, inputs, strict=True):
                _copy_all(into, self._gathered(tensor))

        return self._gather_all(opts, inputs, outputs, act)

    def allgather_coalesced(self, outputs, inputs, opts):
        """Gathers several inputs of all ranks into a list of outputs for each rank."""
        return self.allgather(list(map(list, zip(*outputs, strict=True))), inputs, opts)

    def all_gather_single(self, output, input, opts):
        """Gathers the inputs of all ranks into one output."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        """As ``all_gather_single``, of several tensors."""

        def act(inputs, outputs):
            for output, input in zip(outputs, inputs, strict=True):
                self._gather_single(output, input)

        return self._gather_all(opts, inputs, outputs, act)

    def gather(self, outputs, inputs, opts):
        """Gathers each input of all ranks into a list of outputs on the root."""

        def act(inputs, outputs):
            for at, tensor in enumerate(inputs):
                nothing = self._nothing(tensor)
                given = list(nothing)
                given[opts.rootRank] = tensor
                self._exchange(outputs[at] if outputs else nothing, given)

        return self._call(opts, inputs, outputs if self._is_root(opts) else [], act)

    def scatter(self, outputs, inputs, opts):
        """Replaces each output by the element for this rank of a list of inputs on the root."""

        def act(inputs, outputs):
            for at, output in enumerate(outputs):
                nothing = self._nothing(output)
                taken = list(nothing)
                taken[opts.rootRank] = output
                self._exchange(taken, inputs[at] if inputs else nothing)

        return self._call(opts, inputs if self._is_root(opts) else [], outputs, act)

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts):
        """Gives each rank its rows of the input: equal parts, or ``input_sizes`` rows."""

        def act(inputs, outputs):
            (input,), (output,) = inputs, outputs
            ranks = self.size()
            rows = output_sizes or [len(output) // ranks] * ranks
            given = input_sizes or [len(input) // ranks] * ranks
            into = output.split(list(rows)) if len(output) else [output] * ranks
            from_ = input.split(list(given)) if len(input) else [input] * ranks
            self._exchange(into, from_)

        return self._call(opts, [input], [output], act)

    def alltoall(self, outputs, inputs, opts):
        """Gives each rank its element of the inputs."""
        return self._call(opts, inputs, outputs, lambda given, taken: self._exchange(taken, given))

    def reduce_scatter(self, outputs, inputs, opts):
        """Reduces lists of inputs over all ranks, and returns the element of this rank."""

        def act(inputs, outputs):
            for output, tensors in zip(outputs, inputs, strict=True):
                self._reduce_own(output, tensors, opts.reduceOp)

        return self._divide_sums(opts, inputs, outputs, act)

    def reduce_scatter_single(self, output, input, opts):
        """Reduces the inputs over all ranks, and returns the part of this rank."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        """As ``reduce_scatter_single``, of several tensors."""

        def act(inputs, outputs):
            for output, input in zip(outputs, inputs, strict=True):
                parts = input.reshape(-1).split(output.numel()) if output.numel() else ()
                parts = parts or [input.reshape(-1)] * self.size()
                self._reduce_own(output, parts, opts.reduceOp)

        return self._divide_sums(opts, inputs, outputs, act)

    def barrier(self, opts):
        """Waits for all ranks, and for what is on their current streams."""
        waits = [device.begin(lambda *_: None, [], []) for device in self._devices.used()]
        if not waits:
            return self._submit(opts, OnHost(), [], self._ring.begin_barrier)

        def act(*_):
            for wait in waits:
                wait()
            self._ring.all_gather(bytearray())

        return self._call(opts, [], [], act)

    def send(self, tensors, to, tag):
        """Sends one tensor to a rank, by way of the store."""

        def act(tensors, _):
            (tensor,) = tensors
            _check(tensor)
            self._point_to_point.send(tensor, to, tag)

        device = self._devices.of(tensors)
        device.begin(act, tensors, [])()
        return done_work(tensors, device)

    def recv(self, tensors, source, tag):
        """Replaces one tensor by that which a rank sends."""
        came = bytearray()

        def act(_, tensors):
            (into,) = tensors
            _check(into)
            if len(came) != into.nbytes:
                error = f"{len(came)} bytes came from rank {source} for a tensor of {into.nbytes}"
                raise ValueError(error)
            if came:
                into.copy_(torch.frombuffer(came, dtype=into.dtype).view(into.shape))

        device = self._devices.of(tensors)
        replace = device.begin(act, [], tensors)

        def end(data):
            came.extend(data)
            replace()
            return tensors

        future = device.new_future()
        self._point_to_point.receive(source, tag, self._limit, end, future)
        return _Work(future.then(_raise_or_return))

    # Their names in earlier releases.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # ---- details ----

    def _submit(self, opts, device, results, begin):
        """Begins an operation. The results live until it is done."""
        future = device.new_future()
        limit = opts.timeout.total_seconds()
        begin(
            limit if limit > 0 else self._limit,
            lambda error: future.set_result(results if error is None else error),
        )
        # Only an error that a callback raises reaches users in C++, such as DDP's reducer.
        return _Work(future.then(_raise_or_return))

    def _call(self, opts, given, taken, act, over_nccl=None):
        """Begins a call of ``act(given, taken)``, which replaces the tensors of ``taken``. On GPUs
        with NCCL, it is one of ``over_nccl()``."""
        device = self._devices.of(given, taken)

        def direct(gpu):
            has_nccl = over_nccl is not None and self._ring.has_nccl(gpu)
            if has_nccl:
                over_nccl()
            return has_nccl

        begin = functools.partial(self._ring.begin_call, device.begin(act, given, taken, direct))
        return self._submit(opts, device, taken or given, begin)

    def _gather_all(self, opts, inputs, outputs, act):
        over_nccl = functools.partial(_nccl.all_gather, self._ring, self.size(), outputs, inputs)
        return self._call(opts, inputs, outputs, act, over_nccl)

    def _divide_sums(self, opts, inputs, outputs, act):
        def over_nccl():
            _nccl.reduce_scatter(self._ring, self.size(), outputs, inputs, opts.reduceOp)

        parts = [each if isinstance(each, (list, tuple)) else [each] for each in inputs]
        sizes = [len({tensor.numel() for tensor in each}) for each in parts]
        is_sum = _nccl.sums(sum(map(list, parts), []), opts.reduceOp) and set(sizes) <= {1}
        return self._call(opts, inputs, outputs, act, over_nccl if is_sum else None)

    def _is_root(self, opts):
        return self.rank() == opts.rootRank

    def _reduce(self, tensor, operation):
        """Reduces the tensor over all ranks, in place."""
        kind, (given,) = as_summed([tensor], operation)
        if kind in _MEANS and tensor.dtype in _RING_TYPES:
            flat = given.contiguous().float()
            self._ring.all_reduce(_memory(flat, "f"))
            if kind == ReduceOp.AVG:
                flat.div_(self.size())
            if flat is not tensor:
                tensor.copy_(flat)
            return
        tensor.copy_(_reduced(self._gathered(given), kind))

    def _reduce_own(self, output, inputs, operation):
        """Reduces the elements for this rank of the inputs of all ranks, in the ranks' order."""
        kind, inputs = as_summed(inputs, operation)
        if kind in _MEANS and _is_plain(output):
            given = [tensor.contiguous() for tensor in inputs]
            if all(map(_is_plain, given)):
                parts = [_memory(part, "f") for part in given]
                self._ring.reduce_scatter(parts, _memory(output, "f"))
                if kind == ReduceOp.AVG:
                    output.div_(self.size())
                return
        parts = [torch.empty_like(inputs[self.rank()]) for _ in range(self.size())]
        self._exchange(parts, inputs)
        _check(output)
        output.copy_(_reduced(parts, kind).view(output.shape))

    def _exchange(self, outputs, inputs):
        """Gives each rank its element of the inputs."""
        for tensor in (*outputs, *inputs):
            _check(tensor)
        given = [tensor.contiguous() for tensor in inputs]
        taken = [tensor.contiguous() for tensor in outputs]
        self._ring.exchange([_memory(part) for part in given], [_memory(part) for part in taken])
        for output, part in zip(outputs, taken):
            if output is not part:
                output.copy_(part)

    def _nothing(self, tensor):
        """An empty tensor for each rank."""
        return [tensor.new_empty(0)] * self.size()

    def _gathered(self, tensor):
        """The tensors of all ranks, which have one shape."""
        whole = tensor.new_empty(self.size(), *tensor.shape)
        self._gather_single(whole, tensor)
        return whole.unbind()

    def _gather_single(self, output, input):
        """Gathers the inputs of all ranks in one output."""
        for tensor in output, input:
            _check(tensor)
        given, flat = input.contiguous(), output.contiguous().to(input.dtype)
        parts = flat.view(self.size(), -1) if flat.numel() else [flat] * self.size()
        self._ring.gather(_memory(given), [_memory(part) for part in parts])
        if flat is not output:
            output.copy_(flat)


class _Work(dist._Work):
    """An operation that runs, or has run. Unlike PyTorch's own for futures, it reports errors."""

    def __init__(self, future):
        super().__init__()
        self._future = future

    def wait(self, timeout=None):
        del timeout
        self._future.wait()
        return True

    def get_future(self):
        return self._future


def done_work(result, device=OnHost()):
    """An operation that is done."""
    future = device.new_future()
    future.set_result(result)
    return _Work(future)


def _raise_or_return(future):
    result = future.wait()
    if isinstance(result, Exception):
        raise result
    return result


def _check(tensor):
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"the backend elasticdl takes dense tensors on the CPU or on a CUDA device, not "
            f"{tensor.layout} on {tensor.device}"
        )


def _is_one_plain(device, tensors):
    return isinstance(device, OnHost) and len(tensors) == 1 and _is_plain(tensors[0])


def _is_plain(tensor):
    """Whether the native code can use the memory of the tensor as f32."""
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
    )


def _memory(tensor, kind="B"):
    """The memory of a contiguous tensor, which must live for as long, as bytes or as f32."""
    element = ctypes.c_float if kind == "f" else ctypes.c_ubyte
    count = tensor.numel() * tensor.element_size() // ctypes.sizeof(element)
    # Unlike DLPack, this takes no time that shows.
    return (element * count).from_address(tensor.data_ptr() or ctypes.addressof(_NOTHING))


def _reduced(parts, kind):
    """Reduces tensors of one type, those of 16 bits as f32."""
    dtype = parts[0].dtype
    if kind == ReduceOp.AVG and not dtype.is_floating_point:
        raise ValueError(f"AVG is not defined for {dtype}")
    if kind in _MEANS and dtype in _RING_TYPES:
        parts = [part.float() for part in parts]
    if kind == ReduceOp.AVG:
        return (functools.reduce(torch.add, parts) / len(parts)).to(dtype)
    if kind not in _LOCALLY:
        raise ValueError(f"the backend elasticdl has no reduction {kind}")
    return functools.reduce(_LOCALLY[kind], parts).to(dtype)


def _copy_all(into, tensors):
    for output, tensor in zip(into, tensors, strict=True):
        output.copy_(tensor)


_MEANS = (ReduceOp.SUM, ReduceOp.AVG)
_RING_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_LOCALLY = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_NOTHING = (ctypes.c_float * 1)()
