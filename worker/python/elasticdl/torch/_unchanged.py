"""What a training loop must not change, because all workers must change it in the same step.

The parameters, and buffers that are not sent. What a loop does to them depends on the micro-batches
of its worker, and a worker that joins has not run its loop.
"""

import torch
from torch.nn.modules import module as modules

from ._module import kept_buffers, tensor_of


class Unchanged:
    """The parameters after the last commit of the group."""

    def __init__(self, net, frozen, trainable, values, start, *, is_on_gpu):
        """``values``: the flat memory, whose parameters begin at ``start``."""
        self._net = net
        self._frozen = frozen
        self._named = frozen + trainable
        self._registered = _registered
        self._known = {id(parameter) for _, parameter in self._named}
        self._addresses = [parameter.data_ptr() for _, parameter in self._named]
        self._kept = [(entry, tensor_of(entry)) for entry in kept_buffers(net)]
        self._kept_versions = [buffer._version for _, buffer in self._kept]
        # Elements that are compared, as `parameter.data` has a version of its own. Reading those
        # of a GPU would wait for it.
        self._values = values
        self._compared = None
        if not is_on_gpu:
            ends = start, len(values) - 1
            self._compared = torch.linspace(*ends, _COMPARED, dtype=torch.float64).long()
        self.note()

    def note(self):
        """They are right now: the group has changed them."""
        self.note_versions()
        if self._compared is not None:
            self._elements = self._values[self._compared].view(torch.int32)

    def note_versions(self):
        """The parameters were changed, if at all, and back."""
        self._versions = [parameter._version for _, parameter in self._named]

    def check(self):
        """Refuses what the loop has changed since, by its name."""
        if self._registered != _registered:
            self._check_names()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when training began and requires a gradient now; pass "
                    "unfreezes=True to job.optimizer(), for an optimizer that has it"
                )
        for (name, parameter), address in zip(self._named, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"{name} is in other memory than when training began, where it is trained no "
                    f"more: move and convert the module, as net.to() does, before job.model(), and "
                    f"give {name} no other data"
                )
        name = self.changed()
        if name is not None:
            raise RuntimeError(_changed(name))
        for (entry, buffer), version in zip(self._kept, self._kept_versions, strict=True):
            if tensor_of(entry) is not buffer or buffer._version != version:
                name = entry[0]
                raise RuntimeError(
                    f"the buffer {name} has changed, and its elements ({buffer.dtype}) can't be "
                    "sent to other workers as f32; use a buffer of torch.float32, or leave it as "
                    "it was when training began"
                )

    def changed(self):
        """The name of a parameter whose values have changed; None if there is none."""
        for (name, parameter), version in zip(self._named, self._versions, strict=True):
            if parameter._version != version:
                return name
        if self._compared is not None:
            elements = self._values[self._compared].view(torch.int32)
            if not torch.equal(elements, self._elements):
                return self._name_at(int(self._compared[elements != self._elements][0]))
        return None

    def _check_names(self):
        for name, parameter in self._net.named_parameters():
            if id(parameter) not in self._known:
                raise RuntimeError(
                    f"{name} is not a parameter that the module had when training began, so that "
                    "it is trained on no worker; make all modules before job.model()"
                )
        self._registered = _registered

    def _name_at(self, at):
        address = self._values[at:].data_ptr()
        size = self._values.element_size()
        return next(
            name
            for name, parameter in self._named
            if 0 <= address - parameter.data_ptr() < parameter.numel() * size
        )


def _changed(name):
    return (
        f"the loop changed the values of {name}, which must be the same on all workers. Change "
        "them after each step, in a function on_commit of job.state() (to clip weights, say), or "
        "load them before the first micro-batch is drawn; to test other values, change a copy of "
        "the module"
    )


def _on_registered(*_):
    global _registered
    _registered += 1


# Number of parameters and modules that modules have got: to go through all those of a net at each
# step would take longer than the rest of these checks.
_registered = 0
modules.register_module_parameter_registration_hook(_on_registered)
modules.register_module_module_registration_hook(_on_registered)
_COMPARED = 1024
