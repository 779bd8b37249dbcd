"""The parameters and buffers of a module."""

import torch

from ._place import is_known


def tensors_of(net):
    """Trained parameters, other parameters and buffers of a module, with their names."""
    named = list(net.named_parameters())
    trainable = [entry for entry in named if entry[1].requires_grad]
    frozen = [entry for entry in named if not entry[1].requires_grad]
    if not trainable:
        raise ValueError("the module has no parameter that requires a gradient")
    check_module(net)
    return trainable, frozen, [entry for entry in net.named_buffers() if entry[1].numel()]


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
    for name, buffer in net.named_buffers():
        if buffer.is_complex():
            raise ValueError(f"the buffer {name} must be of real numbers")
        exact = buffer.numel() == 0 or bool((buffer.float().to(buffer.dtype) == buffer).all())
        if not buffer.is_floating_point() and not exact:
            raise ValueError(f"the buffer {name} has integers that f32 can't represent")
