"""The state of an optimizer and of other objects, in flat memory.

Optimizers make their state lazily, in the first step. Its names, shapes and types are found by a
step of a copy of the optimizer. The layout is the same on every worker:

    tensors on the module's device | others, numbers | flag of each entry | length | JSON
                                   |--------------------- on the host -------------------

The tensors are in the order of the module, as a program may give its optimizer the parameters in
any, such as that of a set. The JSON is of settings and objects. The tensors that objects have at
the beginning, such as averages of the parameters, are beside those of the optimizer, and the JSON
says where. Memory of zeros is the state before the first step: no entry exists yet.
"""

import base64
import collections
import hashlib
import json

import torch

from ._new_state import examples


class State:
    """The layout, and the objects whose state it holds."""

    def __init__(self, optimizer, objects, place, names, unfreezes=False, groups=None):
        """``names``: of each parameter, in the order of the optimizer, its index in the module and
        its name. ``unfreezes``: parameters that are frozen have state, too. ``groups``: where the
        settings are, if not in those of the optimizer."""
        self._optimizer = optimizer
        self._unfreezes = unfreezes
        self._groups = optimizer.param_groups if groups is None else groups
        # Whether a step has changed the state, and what follows its update has not.
        self.is_open = False
        self._objects = objects
        self._place = place
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._names = names
        self._own_groups = self._named_groups()
        self._entries = []
        at = 0
        entries = [_Entry(place.device, *each) for each in examples(optimizer, unfreezes)]
        entries.sort(key=lambda entry: names[entry.index])
        # The tensors of objects.
        found = [(None, path, tensor, tensor.device) for path, tensor in self._found()]
        self._tensors = [_Entry(place.device, *each) for each in found]
        self._by_path = {entry.name: number for number, entry in enumerate(self._tensors)}
        for is_on_host in (False, True):
            if is_on_host:
                self._host_at = at
            for entry in entries + self._tensors:
                if entry.is_on_host == is_on_host:
                    entry.at = at
                    if entry.index is not None:
                        self._entries.append(entry)
                    at = -(-(at + entry.bytes) // _ALIGNMENT) * _ALIGNMENT
        self._flags = at
        self._text = -(-(self._flags + 4 * len(self._entries)) // _ALIGNMENT) * _ALIGNMENT
        self._text_max = 2 * len(self._encoded(self._number)) + _TEXT_SPARE
        self.floats = -(-(self._text + _ALIGNMENT + self._text_max) // 4)

    def bind(self, floats):
        """Uses this memory of the place, of at least ``floats`` zeros."""
        whole = floats.view(torch.uint8)
        self._mirror = self._place.mirror(whole[self._host_at : 4 * self.floats])
        self._bytes = self._mirror.host
        flags = self._flags - self._host_at
        self._flag = self._bytes[flags : flags + 4 * len(self._entries)].view(torch.int32)
        text = self._text - self._host_at
        self._length = self._bytes[text : text + 8].view(torch.int64)
        self._text_at = text + _ALIGNMENT
        # What the memory has of these.
        self._saved_flags = self._saved_text = None
        for entry in self._entries + self._tensors:
            if entry.is_on_host:
                entry.bind(self._bytes, entry.at - self._host_at)
            else:
                entry.bind(whole, entry.at)

    def is_unmade(self):
        """Whether the next step makes the optimizer's state."""
        return bool(self._entries) and not self._optimizer.state

    def move(self, parameters):
        """Moves the optimizer's state of these parameters to the memory, where it stays."""
        self._mirror.begin()
        own = {id(parameter) for parameter in parameters}
        for entry in self._entries:
            parameter = self._parameters[entry.index]
            if id(parameter) in own:
                entry.save(self._optimizer.state.get(parameter, {}))

    def save(self):
        """Moves the optimizer's state to the memory, where it stays, and copies the rest."""
        self._mirror.begin()
        of = self._optimizer.state
        flags = [e.save(of.get(self._parameters[e.index], {})) for e in self._entries]
        if sum(len(of.get(p, ())) for p in self._parameters) > len(flags) - flags.count(_ABSENT):
            self._refuse_more()
        # Element by element, this would take longer than the optimizer.
        if flags != self._saved_flags:
            self._flag.copy_(torch.tensor(flags, dtype=torch.int32))
            self._saved_flags = flags
        text = self._encoded(self._stored)
        if len(text) > self._text_max:
            raise RuntimeError(
                f"the settings of the optimizer and the objects of job.state() take {len(text)} "
                f"bytes; when training began they took so few that {self._text_max} are reserved"
            )
        if text != self._saved_text:
            self._length[0] = len(text)
            # Nothing is left of a longer one: equal states have equal bytes.
            padded = bytearray(text.ljust(self._text_max, b"\0"))
            self._bytes[self._text_at : self._text_at + self._text_max] = torch.frombuffer(
                padded, dtype=torch.uint8
            )
            self._saved_text = text
        self._mirror.push()

    def load(self):
        """Takes the state over from the memory."""
        self._mirror.pull()
        self._saved_flags = self._saved_text = None
        self._optimizer.state.clear()
        for flag, entry in zip(self._flag.tolist(), self._entries):
            if flag:
                state = self._optimizer.state[self._parameters[entry.index]]
                state[entry.name] = entry.load(flag)
        self.is_open = False
        length = int(self._length[0])
        if not 0 <= length <= self._text_max:
            raise RuntimeError(
                f"the settings of the optimizer and the objects of job.state() take {length} bytes "
                f"in the group's state, and {self._text_max} are reserved for those of this "
                "program; all workers, and jobs that resume, must have the same"
            )
        if length:
            text = bytes(self._bytes[self._text_at : self._text_at + length].tolist())
            groups, objects, *more = json.loads(text)
            self.is_open = bool(more and more[0])
            # An older version does not say which parameters the groups have.
            self._check_groups(more[1] if len(more) > 1 else [None] * len(groups))
            for group, values in zip(self._groups, groups):
                for name, value in decode(values).items():
                    if name not in _HOW:
                        group[name] = as_like(value, group.get(name))
            for name, value in self._objects.items():
                # A checkpoint of an older version does not have all.
                if name in objects:
                    value.load_state_dict(decode(objects[name], self._copied))

    def _named_groups(self):
        """A name for each group of parameters, with a digest of theirs."""
        names, named = iter(self._names), []
        for at, group in enumerate(self._groups):
            own = [name for _, name in sorted(next(names) for _ in group["params"])]
            digest = hashlib.sha256(repr(own).encode()).hexdigest()[:12]
            few = ", ".join(own[:3]) + (f" and {len(own) - 3} more" if len(own) > 3 else "")
            named.append(f"parameter group {at} with {few or 'no parameters'} ({digest})")
        return named

    def _check_groups(self, saved):
        own = self._own_groups
        if len(saved) != len(own):
            raise RuntimeError(
                f"the optimizer of the group's state has {len(saved)} parameter groups, and this "
                f"program's has {len(own)}; make them equal"
            )
        pairs = enumerate(zip(saved, own))
        at = next((at for at, (there, here) in pairs if there not in (None, here)), None)
        if at is None:
            return
        raise RuntimeError(
            f"this program's optimizer has {own[at]}, and that of the group's state {saved[at]}; "
            "give it the same groups of parameters, in the same order, as schedulers and settings "
            "go by it"
        )

    def _refuse_more(self):
        known = {(entry.index, entry.name) for entry in self._entries}
        for index, parameter in enumerate(self._parameters):
            for name in self._optimizer.state.get(parameter, ()):
                if (index, name) not in known:
                    raise RuntimeError(
                        f"the optimizer has made a state {name!r} that a first step before "
                        "training did not make, so no other worker would get it. Choose the "
                        "settings that it is for, such as momentum, before the first micro-batch "
                        "is drawn"
                    )

    def parts(self, start, place):
        """What lies where, for checkpoints: name, first float, number of floats, and what those are
        that the part may lack elsewhere.

        ``start``: of this memory. ``place(index, name)``: the first float and the number of floats
        of what lies elsewhere; None of what is here.
        """
        parts, flags = [], []
        groups = [group for group in self._groups for _ in group["params"]]
        for number, entry in enumerate(self._entries):
            parameter, group = self._parameters[entry.index], groups[entry.index]
            # Of Adagrad, whose frozen parameters have state, too.
            is_frozen = not (parameter.requires_grad or self._unfreezes)
            of_frozen = is_frozen and entry.name == "sum"
            fill = group.get("initial_accumulator_value") if of_frozen else None
            name = f"{entry.name} of {self._names[entry.index][1]}"
            at, length = place(entry.index, entry.name) or (start + entry.at // 4, entry.floats)
            parts.append((name, at, length, fill))
            flags.append((f"whether there is {name}", start + self._flags // 4 + number, 1, None))
        for entry in self._tensors:
            name = ".".join(map(str, entry.name))
            parts.append((f"job.state {name}", start + entry.at // 4, entry.floats, None))
        # The settings go by the groups, which a state of other groups does not fit.
        named = [(name, start, 0, None) for name in self._own_groups]
        text = start + self._text // 4
        settings = "the settings and objects", text, start + self.floats - text, 0.0
        return [*parts, *flags, *named, settings]

    def _found(self):
        """Path and tensor of the tensors of objects that can be in the memory."""
        found = []

        def find(path, tensor):
            is_flat = tensor.layout == torch.strided and tensor.numel()
            if is_flat and tensor.device in (self._place.device, _HOST):
                found.append((path, tensor))

        for name, value in self._objects.items():
            encode(value.state_dict(), f"job.state({name!r})", find, (name,))
        return found

    def _number(self, path, tensor):
        """The number of a tensor of an object; None if the memory does not have it."""
        number = self._by_path.get(path)
        if number is None:
            return None
        of = self._tensors[number]
        return number if (tensor.shape, tensor.dtype) == (of.shape, of.kind) else None

    def _stored(self, path, tensor):
        number = self._number(path, tensor)
        if number is not None:
            self._tensors[number].view.copy_(tensor.detach())
        return number

    def _copied(self, number):
        entry = self._tensors[number]
        return entry.view.clone().to(entry.device)

    def settings(self):
        """The kind of the optimizer and its settings now, as text."""
        return json.dumps([type(self._optimizer).__name__, *self._encoded_groups(*_HOW)])

    def _encoded_groups(self, *without):
        without = {"params", *without}
        groups = [{n: group[n] for n in group if n not in without} for group in self._groups]
        return [encode(group, "the optimizer") for group in groups]

    def _encoded(self, number_of):
        groups = self._encoded_groups()
        objects = {
            name: encode(value.state_dict(), f"job.state({name!r})", number_of, (name,))
            for name, value in self._objects.items()
        }
        values = [groups, objects, self.is_open, self._own_groups]
        return json.dumps(values, separators=(",", ":")).encode()


class _Entry:
    """One value of the state of one parameter."""

    def __init__(self, device, index, name, value, of_value):
        self.index, self.name = index, name
        self.is_tensor = torch.is_tensor(value)
        self.kind = value.dtype if self.is_tensor else type(value)
        self.shape = value.shape if self.is_tensor else ()
        if not self.is_tensor and self.kind not in (int, float, bool, type(None)):
            raise TypeError(f"the optimizer's state {name!r} is a {self.kind.__name__}")
        if self.is_tensor and (value.is_sparse or of_value not in (device, _HOST)):
            raise ValueError(
                f"the optimizer's state {name!r} must be dense, and on the CPU or on {device}"
            )
        self.device = of_value
        self.is_on_host = not self.is_tensor or of_value == _HOST
        self.bytes = value.numel() * value.element_size() if self.is_tensor else 8
        self.floats = -(-self.bytes // 4)

    def bind(self, memory, at):
        kind = self.kind if self.is_tensor else torch.float64
        self.view = memory[at : at + self.bytes].view(kind).view(self.shape)

    def save(self, state):
        if self.name not in state:
            return _ABSENT
        value = state[self.name]
        if value is None:
            return _NONE
        if not self.is_tensor:
            self.view.fill_(value)
        elif value.data_ptr() != self.view.data_ptr() or self.view.numel() == 0:
            if value.shape != self.shape or value.dtype != self.kind:
                raise RuntimeError(f"the optimizer's state {self.name!r} changes its shape or type")
            self.view.copy_(value)
            state[self.name] = self.view
        return _PRESENT

    def load(self, flag):
        if flag == _NONE:
            return None
        return self.view if self.is_tensor else self.kind(self.view.item())


def as_like(value, old):
    """A value of a setting, on the device of the old one."""
    if torch.is_tensor(value) and torch.is_tensor(old):
        return value.to(old.device)
    return value


def encode(value, what, number_of=None, path=()):
    """JSON of a value, with tags for what JSON does not have. ``number_of(path, tensor)``: the
    number of a tensor that is elsewhere, or None."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    number = number_of(path, value) if torch.is_tensor(value) and number_of else None
    if number is not None:
        return {"number": number}
    if torch.is_tensor(value):
        dense = value.detach().cpu().contiguous()
        data = bytes(dense.reshape(-1).view(torch.uint8).tolist()) if dense.numel() else b""
        name = str(dense.dtype).removeprefix("torch.")
        return {"tensor": [name, list(dense.shape), base64.b64encode(data).decode()]}
    for tag, kind in _MAPPINGS.items():
        if type(value) is kind:
            pairs = value.items()
            return {
                tag: [[encode(k, what), encode(v, what, number_of, (*path, k))] for k, v in pairs]
            }
    for tag, kind in _SEQUENCES.items():
        if type(value) is kind:
            return {
                tag: [
                    encode(element, what, number_of, (*path, at))
                    for at, element in enumerate(value)
                ]
            }
    raise TypeError(
        f"{what} has a {type(value).__name__} in its state, which can't be sent to other workers; "
        "numbers, strings, tensors, lists and dicts can"
    )


def decode(value, tensor_of=None):
    """The value of JSON. ``tensor_of(number)``: a tensor that is elsewhere."""
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "number":
        return tensor_of(content)
    if tag == "tensor":
        name, shape, text = content
        kind, data = getattr(torch, name), bytearray(base64.b64decode(text))
        if not data:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(data, dtype=kind).view(shape)
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({decode(k): decode(v, tensor_of) for k, v in content})
    return _SEQUENCES[tag](decode(element, tensor_of) for element in content)


_HOST = torch.device("cpu")
# Settings that say how this program computes, which is not a part of the state.
_HOW = ("foreach", "fused", "capturable", "differentiable")
_MAPPINGS = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": collections.Counter,
}
_SEQUENCES = {"list": list, "tuple": tuple}
_ABSENT, _PRESENT, _NONE = 0, 1, 2
_ALIGNMENT = 16
_TEXT_SPARE = 4096
