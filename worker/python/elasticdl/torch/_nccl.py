"""The operations of a process group that go over NCCL: those on tensors of a GPU.

They are called in the thread of the group, on its stream, and return when the results of NCCL are
there. Sums go to new memory, so that the tensors stay as they are if NCCL fails.
"""

import torch
from torch._C._distributed_c10d import ReduceOp


def sums(tensors, operation):
    """Whether NCCL reduces them: the answer is the same on all ranks."""
    kinds = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM
    return kind_of(operation) in kinds and all(tensor.dtype in _TYPES for tensor in tensors)


def kind_of(operation):
    """The kind of a reduction."""
    return getattr(operation, "op", operation)


def as_summed(tensors, operation):
    """The kind of a reduction, and the tensors as it reduces them."""
    if kind_of(operation) != ReduceOp.PREMUL_SUM:
        return kind_of(operation), tensors
    factor = operation.factor
    if torch.is_tensor(factor):
        factor = factor.to(tensors[0].device)
    return ReduceOp.SUM, [tensor * factor for tensor in tensors]


def all_reduce(ring, size, tensors, operation):
    """Reduces each tensor, in place."""
    results = [_summed(ring, size, "all_reduce", each, each.numel(), operation) for each in tensors]
    for tensor, result in zip(tensors, results, strict=True):
        tensor.copy_(result.view(tensor.shape))


def reduce_scatter(ring, size, outputs, inputs, operation):
    """Reduces each input, or list of inputs that have one size, and divides it among the ranks."""
    for output, given in zip(outputs, inputs, strict=True):
        given = given if torch.is_tensor(given) else torch.cat([part.reshape(-1) for part in given])
        result = _summed(ring, size, "reduce_scatter", given, output.numel(), operation)
        output.copy_(result.view(output.shape))


def broadcast(ring, size, root, given, taken):
    """Replaces the tensors of ``taken`` by those of ``given`` on the root."""
    for tensor in given:
        flat = _bytes(tensor)
        _call(ring, size, "broadcast", flat, flat, "byte", root)
    for tensor in taken:
        into = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        _call(ring, size, "broadcast", into, into, "byte", root)
        tensor.copy_(into.view(tensor.dtype).view(tensor.shape))


def all_gather(ring, size, outputs, inputs):
    """Gathers each input into an output, or a list of outputs, one for each rank."""
    for output, given in zip(outputs, inputs, strict=True):
        flat, is_single = _bytes(given), torch.is_tensor(output)
        is_direct = is_single and output.is_contiguous() and output.dtype == given.dtype
        into = _bytes(output) if is_direct else flat.new_empty(size * len(flat))
        _call(ring, size, "all_gather", flat, into, "byte")
        if is_direct:
            continue
        parts = into.view(given.dtype)
        if is_single:
            output.copy_(parts.view(output.shape))
            continue
        for of_rank, part in zip(output, parts.view(size, *given.shape), strict=True):
            of_rank.copy_(part)


def _summed(ring, size, kind, tensor, length, operation):
    """The elements, ``length`` of them, of a sum over all ranks."""
    reduction, (flat,) = as_summed([tensor.contiguous().view(-1)], operation)
    result = flat.new_empty(length)
    _call(ring, size, kind, flat, result, _TYPES[flat.dtype])
    return result.div_(size) if reduction == ReduceOp.AVG else result


def _call(ring, size, kind, given, taken, dtype, root=0):
    length = min(len(given), len(taken))
    lengths = {"all_gather": (1, size), "reduce_scatter": (size, 1)}.get(kind, (1, 1))
    if (len(given), len(taken)) != tuple(length * each for each in lengths):
        raise ValueError(
            f"{kind}: {len(given)} elements to {len(taken)}, of type {dtype}, over {size} ranks"
        )
    ring.over_nccl(kind, given.data_ptr(), taken.data_ptr(), length, dtype, root)


def _bytes(tensor):
    """The bytes of a tensor; its memory, if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
