"""How an optimizer makes its state: lazily, in its first step. No memory is taken for a second one.

What it will be is found by a step of a copy on PyTorch's device "meta", whose tensors have shapes
and no elements. The first step goes through the parameters part by part, if that has the bits of
one for all, so that the state of one part at a time is in new memory before it is moved.
"""

import copy

import torch
from torch.optim import optimizer as hooks_of_all

from ._together import optimizers_of


def examples(optimizer, unfreezes):
    """Index of the parameter, name and an example of each value of an optimizer's state, and the
    device of those that are tensors, as the example may be on "meta"."""
    parameters = _parameters(optimizer)
    twin = None
    # Another optimizer may make another state on a GPU than elsewhere.
    if all(each.is_cpu for each in parameters) or _is_elementwise(optimizer):
        try:
            twin = _stepped(optimizer, unfreezes, _on_meta(optimizer))
        except Exception:
            # It reads elements, or needs kernels that "meta" does not have.
            twin = None
    if twin is None:
        try:
            twin = _stepped(optimizer, unfreezes, {})
        except TypeError as error:
            kind = type(optimizer).__name__
            raise ValueError(f"{kind} is not supported: its step() needs a closure") from error
    for index, (parameter, own) in enumerate(zip(_parameters(twin), parameters, strict=True)):
        for name, value in twin.state.get(parameter, {}).items():
            device = value.device if torch.is_tensor(value) else None
            yield index, name, value, own.device if device == _META else device


def first_step(optimizer, move):
    """A step that makes state. ``move(parameters)`` moves that of some parameters elsewhere."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    if not _is_elementwise(optimizer) or _has_hooks(optimizer):
        optimizer.step()
        move(_parameters(optimizer))
        return
    try:
        for group in groups:
            group["params"] = []
        for group, params in zip(groups, whole, strict=True):
            for part in _parts(params):
                group["params"] = part
                optimizer.step()
                move(part)
            group["params"] = []
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def _stepped(optimizer, unfreezes, memo):
    """A copy of the optimizer that has made a step. ``memo``: as of ``copy.deepcopy()``."""
    twin = copy.deepcopy(optimizer, memo)
    for parameter in _parameters(twin):
        if parameter.requires_grad or unfreezes:
            parameter.grad = torch.zeros_like(parameter)
    twin.step()
    return twin


def _on_meta(optimizer):
    """What a copy has in the place of parameters and of the state that there is of each."""
    memo = {}
    for parameter in _parameters(optimizer):
        state = optimizer.state.get(parameter, {}).values()
        # An optimizer may read numbers, such as that of its steps.
        tensors = [each for each in state if torch.is_tensor(each) and each.numel() > 1]
        for tensor in tensors:
            if tensor.device == parameter.device:
                memo[id(tensor)] = torch.empty_like(tensor, device=_META)
        on_meta = torch.empty_like(parameter, device=_META)
        memo[id(parameter)] = torch.nn.Parameter(on_meta, requires_grad=parameter.requires_grad)
    return memo


def _parameters(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parts(parameters):
    """Neighbours that are small are together: a step has a cost of its own."""
    part, length = [], 0
    for parameter in parameters:
        part.append(parameter)
        length += parameter.numel()
        if length >= _PART_LEN:
            yield part
            part, length = [], 0
    if part:
        yield part


def _is_elementwise(optimizer):
    return all(type(each) in ELEMENTWISE for each in optimizers_of(optimizer))


def _has_hooks(optimizer):
    """Whether a step is seen by others than the job, whose training has one hook."""
    own = [
        len(each._optimizer_step_pre_hooks) > 1 or each._optimizer_step_post_hooks
        for each in optimizers_of(optimizer)
    ]
    of_all = hooks_of_all._global_optimizer_pre_hooks, hooks_of_all._global_optimizer_post_hooks
    return any((*own, *of_all))


# Their `step()` is a function of each element, its gradient and its state, and of numbers that are
# the same for all elements of a parameter. A subclass may be anything.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_META = torch.device("meta")
# Number of elements: 4 MiB.
_PART_LEN = 1 << 20
