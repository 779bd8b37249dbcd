"""The state of an optimizer that is divided over the workers of a job, ``--shard-optimizer``.

The trainer cuts the flat memory of the parameters into chunks, and each worker holds the state of
some. An update changes these alone; the parameters of the others come from the workers that hold
their state. All of it is on the host, where a module on a GPU has a copy of its parameters::

    buffers | frozen parameters | a | b              | c   |  parameters, in the order of the module
    ........................ chunk 1 ....| chunk 2 ..|....    the pieces of b: of chunks 1, 2 and 3

In an update, the pieces of the held chunks are parameters of a twin of the optimizer. Their
gradient is the trainer's sum, and their state is in the trainer's memory. What an optimizer knows
of a parameter beside its elements, such as its number of steps, all workers know: the twin has a
parameter without elements for each one of the optimizer, which steps as the pieces do.
"""

import bisect
import collections
import copy
import itertools

import torch

from ._new_state import ELEMENTWISE, first_step
from ._place import at_address


class Chunks:
    """The chunks of this worker, of one optimizer."""

    def __init__(self, optimizer, unfreezes):
        reason = _obstacle(optimizer)
        if reason is not None:
            raise ValueError(
                f"--shard-optimizer can't be used for this program: {reason}; or train it without "
                "--shard-optimizer, so that each worker has all of the optimizer's state"
            )
        self._optimizer = optimizer
        self.twin = copy.copy(optimizer)
        self.twin.state = collections.defaultdict(dict)
        self.twin.param_groups = [_without_elements(group) for group in optimizer.param_groups]
        # Of each parameter its group and the one in its place.
        self._places = {}
        # The program may call that of its own optimizer.
        optimizer.register_state_dict_pre_hook(lambda _: refuse_whole("state_dict()"))
        for at, (group, twin) in enumerate(zip(optimizer.param_groups, self.twin.param_groups)):
            for parameter, empty in zip(group["params"], twin["params"]):
                self._places[parameter] = at, empty
                if parameter in optimizer.state:
                    self.twin.state[empty] = _state_at_start()
        # It is that of Adagrad before its first step.
        optimizer.state.clear()
        self._slots = _slots(self.twin, unfreezes)

    @property
    def slots(self):
        """Number of floats of state of a parameter's element."""
        return len(self._slots)

    def lay_out(self, first, parameters):
        """These are the parameters with state, from ``first`` on in the flat memory."""
        self._first, self._parameters = first, parameters
        ends = itertools.accumulate((each.numel() for each in parameters), initial=first)
        self._starts = list(ends)
        self._begins = dict(zip(parameters, self._starts))

    def place(self, parameter, name):
        """The first float and the number of floats of a parameter's state of this name in that of
        all chunks, ``[slots, elements]``; None if chunks do not have it."""
        slot = self._slots.get(name)
        if slot is None or parameter not in self._begins:
            return None
        at = slot * (self._starts[-1] - self._first) + self._begins[parameter] - self._first
        return at, parameter.numel()

    def bind(self, values, buffer_len):
        """Uses this flat memory of the host."""
        self._values, self._buffer_len = values, buffer_len

    def step(self, chunks, records, divisor, factor, is_unused):
        """Updates the parameters and buffers of ``chunks``, as the core gives them.

        ``divisor``: of the sums. ``factor``: of the mean gradient, or None. ``is_unused(index)``:
        whether a parameter has no gradient, and stays as it is.
        """
        makes_state = bool(self._slots) and not self.twin.state
        pieces = [piece for chunk in chunks for piece in self._cut(chunk, records, divisor, factor)]
        groups = self.twin.param_groups
        for group, twin in zip(self._optimizer.param_groups, groups):
            twin.update((name, value) for name, value in group.items() if name != "params")
        empties = [list(group["params"]) for group in groups]
        for at, parameter in enumerate(self._parameters):
            if parameter in self._places:
                # As in a plain loop: the optimizer leaves it as it is.
                self._places[parameter][1].grad = None if is_unused(at) else _NOTHING
        slots_of = {}
        for parameter, piece, gradient, slots in pieces:
            at, empty = self._places[parameter]
            if empty.grad is None:
                self._begin(empty, slots, groups[at])
                continue
            piece.grad = gradient
            groups[at]["params"].append(piece)
            self.twin.state[piece] = self._state_of(empty, slots, groups[at])
            slots_of[piece] = slots

        def move(parameters):
            for piece in parameters:
                if piece in slots_of:
                    self._move(piece, slots_of[piece])

        with torch.enable_grad():
            if makes_state:
                first_step(self.twin, move)
            else:
                self.twin.step()
                move(slots_of)
        # As PyTorch's schedulers ask for.
        self._optimizer._opt_called = True
        for group, params in zip(groups, empties):
            group["params"] = params

    def _move(self, piece, slots):
        """Moves the state of a piece to that of its chunk."""
        for name, value in self.twin.state.pop(piece).items():
            of_slot = None if value is None else self._slots.get(name)
            if of_slot is not None and value.data_ptr() != slots[of_slot].data_ptr():
                slots[of_slot].copy_(value)

    def _cut(self, chunk, records, divisor, factor):
        """The pieces of a chunk: parameter, elements, gradient and state, `[slots, elements]`."""
        start, length, slots_address, sum_address = chunk
        end, first = start + length, max(start, self._first)
        sums = at_address(sum_address, length)
        if start < self._buffer_len:
            of_buffers = slice(start, min(end, self._buffer_len))
            self._values[of_buffers] += sums[: of_buffers.stop - start] / records
        if first >= end:
            return
        gradient = sums[first - start :]
        torch.div(gradient, divisor, out=gradient)
        if factor is not None:
            gradient.mul_(factor)
        slots = torch.empty(0, end - first)
        if self._slots:
            slots = at_address(slots_address, len(self._slots) * (end - first))
            slots = slots.view(-1, end - first)
        index = bisect.bisect_right(self._starts, first) - 1
        while index < len(self._parameters) and self._starts[index] < end:
            begin, stop = max(self._starts[index], first), min(self._starts[index + 1], end)
            parameter = self._parameters[index]
            if begin < stop and parameter in self._places:
                of_piece = slice(begin - first, stop - first)
                elements = self._values[begin:stop]
                yield parameter, elements, gradient[of_piece], slots[:, of_piece]
            index += 1

    def _begin(self, empty, slots, group):
        """The state of a piece before the first step is that of Adagrad."""
        if "initial_accumulator_value" in group and not self.twin.state[empty]["step"]:
            slots.fill_(group["initial_accumulator_value"])

    def _state_of(self, empty, slots, group):
        """The state of a piece, whose parameter has another one without elements in its place."""
        self._begin(empty, slots, group)
        state = {}
        for name, value in self.twin.state.get(empty, {}).items():
            at = self._slots.get(name)
            if at is not None and value is not None:
                value = slots[at]
            elif torch.is_tensor(value):
                value = value.clone()
            state[name] = value
        return state


def refuse_whole(what):
    """Refuses what needs the whole state of the optimizer."""
    raise RuntimeError(
        "with --shard-optimizer no worker has all of the optimizer's state, so there is no "
        f"{what}: checkpoints have it (--checkpoint-dir), from which jobs with the option and "
        "without it resume, and param_groups has the settings"
    )


def _obstacle(optimizer):
    """Why the state of an optimizer can't be divided, and what to do; None if it can."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        return (
            f"{kind.__name__} may need whole parameters at once, and the optimizers that are known "
            f"to change each element by itself are those of torch.optim: {known}; use one of these"
        )
    for name in ("fused", "differentiable"):
        if any(group.get(name) for group in optimizer.param_groups):
            return (
                f"with {name}=True, what {kind.__name__} makes of an element depends on where it "
                f"is; set {name}=False"
            )
    for name, value in (pair for group in optimizer.param_groups for pair in group.items()):
        if name == "capturable" and value:
            return "the update is on the host, for which capturable=True is not; set it to False"
        if torch.is_tensor(value) and value.device.type != "cpu":
            return f"the update is on the host, and {name} is a tensor on a GPU; give a number"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks, which would see a part of its parameters; remove them"
    if optimizer.state and not _is_at_start(optimizer):
        return (
            "the optimizer has a state that load_state_dict() or step() has made, on one worker; "
            "resume from a checkpoint of a job, or begin with a new optimizer"
        )
    return None


def _is_at_start(optimizer):
    """Whether a state is what Adagrad has before its first step: others have none."""
    first = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    if type(optimizer) is not torch.optim.Adagrad or len(optimizer.state) != len(first):
        return False
    states = [(optimizer.state[p], group["initial_accumulator_value"]) for p, group in first]
    return all(not state["step"] and (state["sum"] == value).all() for state, value in states)


def _state_at_start():
    """That of Adagrad, of a parameter without elements."""
    return {"step": torch.tensor(0.0), "sum": torch.empty(0)}


def _without_elements(group):
    """A parameter group with parameters without elements in the place of its own."""
    params = [torch.empty(0, requires_grad=each.requires_grad) for each in group["params"]]
    return {**group, "params": params}


def _slots(twin, unfreezes):
    """The numbers of the kinds of state that a parameter has of each of its elements."""
    dry = copy.deepcopy(twin)
    for parameter in (each for group in dry.param_groups for each in group["params"]):
        if parameter.requires_grad or unfreezes:
            parameter.grad = torch.zeros_like(parameter)
    dry.step()
    states = [state.items() for state in dry.state.values()]
    values = [pair for items in states for pair in items]
    names = [name for name, value in values if torch.is_tensor(value) and not value.numel()]
    return {name: at for at, name in enumerate(dict.fromkeys(names))}


_NOTHING = torch.empty(0)
