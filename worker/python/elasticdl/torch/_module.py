"""The parameters and buffers of a module."""

import torch

from ._place import is_known


def tensors_of(net):
    """Trained parameters, other parameters and buffers of a module, with their names: of a buffer
    its name, its owner and its key there, as a module may put another tensor in its place."""
    named = list(net.named_parameters())
    trainable = [entry for entry in named if entry[1].requires_grad]
    frozen = [entry for entry in named if not entry[1].requires_grad]
    if not trainable:
        raise ValueError("the module has no parameter that requires a gradient")
    check_module(net)
    return trainable, frozen, [entry for entry in _buffers(net) if is_sent(tensor_of(entry))]


def kept_buffers(net):
    """The buffers that are not sent to other workers, as f32 can't represent their elements. They
    stay what they are, and have elements."""
    buffers = [(entry, tensor_of(entry)) for entry in _buffers(net)]
    return [entry for entry, buffer in buffers if buffer.numel() and not is_sent(buffer)]


def tensor_of(entry):
    """The tensor that is a buffer now."""
    name, owner, key = entry
    buffer = owner._buffers.get(key)
    if buffer is None:
        raise RuntimeError(f"the buffer {name} is gone; a module keeps the buffers that it has")
    return buffer


def is_sent(buffer):
    """Whether a buffer is a part of the group's state: f32 can represent its elements."""
    if buffer.numel() == 0 or buffer.is_complex():
        return False
    return buffer.is_floating_point() or bool((buffer.float().to(buffer.dtype) == buffer).all())


def _buffers(net):
    found = {}
    for prefix, module in net.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                found.setdefault(id(buffer), (f"{prefix}.{key}".lstrip("."), module, key))
    return list(found.values())


def check_module(net):
    """Refuses a module whose parameters or buffers can't be trained."""
    for name, parameter in net.named_parameters():
        if parameter.dtype != torch.float32 or not is_known(parameter.device):
            raise ValueError(
                f"{name} is {parameter.dtype} on {parameter.device}; parameters must be "
                "torch.float32 on the CPU or on a CUDA device"
            )
    devices = {value.device for value in (*net.parameters(), *net.buffers())}
    if len(devices) > 1:
        raise ValueError(
            f"the module is on several devices, {', '.join(sorted(map(str, devices)))}; move it to "
            "one, such as job.device"
        )
