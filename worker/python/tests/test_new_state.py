"""Tests of how optimizers make their state."""

import copy
import importlib.util
import unittest
from unittest import mock

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

import torch
from torch import optim

from elasticdl.torch import _new_state
from elasticdl.torch._new_state import examples, first_step
from elasticdl.torch._place import OnHost
from elasticdl.torch._state import State

ELEMENTWISE = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    (optim.Adam, {"foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(0.1), "amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (optim.Adadelta, {}),
    (optim.ASGD, {}),
    (optim.Rprop, {}),
]


class OfAnotherShape(optim.Optimizer):
    """A third party's, whose state is not of the shape of its parameters, and made when needed."""

    def __init__(self, params, reads=False):
        super().__init__(params, {"reads": reads})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["rows"] = parameter.new_zeros(len(parameter), dtype=torch.float64)
                    state["count"], state["last"] = 0, None
                    if parameter.dim() > 1:
                        state["columns"] = parameter.new_ones(parameter.shape[1:])
                if group["reads"]:
                    state["count"] += int(parameter.grad.abs().sum().item() >= 0)
                state["rows"] += parameter.grad.reshape(len(parameter), -1).sum(1)
                parameter.sub_(parameter.grad, alpha=0.1)


class NewState(unittest.TestCase):
    """Of parameters on the host."""

    def made(self, kind, settings):
        own = [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (5,), (2, 2), (7,))]
        own[2].requires_grad_(False)
        groups = {"params": own[:1]}, {"params": own[1:], "weight_decay": 0.0}
        return own, kind(groups if "weight_decay" in settings else own, **settings)

    def give_gradients(self, own, seed):
        random = torch.Generator().manual_seed(seed)
        for parameter in own:
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=random)

    def test_the_state_is_found_without_its_memory_and_has_the_types_of_a_first_step(self):
        others = [(optim.Adafactor, {}), (OfAnotherShape, {}), (OfAnotherShape, {"reads": True})]
        for kind, settings in ELEMENTWISE + others:
            with self.subTest(kind=kind.__name__, settings=settings):
                own, optimizer = self.made(kind, settings)
                found = list(examples(optimizer, False))
                # These read elements, or have no kernels for tensors without.
                is_read = kind in (optim.ASGD, optim.Adafactor) or {"reads", "fused"} & {*settings}
                for _, name, value, _ in found:
                    if torch.is_tensor(value) and value.numel() > 1:
                        self.assertNotEqual(value.is_meta, bool(is_read), name)
                self.give_gradients(own, 1)
                optimizer.step()
                expected = [
                    (index, name, *described(value))
                    for index, parameter in enumerate(own)
                    for name, value in optimizer.state.get(parameter, {}).items()
                ]
                described_ones = [
                    (index, name, *described(value)[:-1], device)
                    for index, name, value, device in found
                ]
                self.assertEqual(described_ones, expected)

    def test_a_state_that_was_loaded_is_found_too(self):
        own, optimizer = self.made(optim.Adam, {})
        self.give_gradients(own, 1)
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        names = [name for _, name, _, _ in examples(optimizer, False)]
        self.assertEqual(names, ["step", "exp_avg", "exp_avg_sq"] * 3)
        after = optimizer.state_dict()
        for index, state in before["state"].items():
            for name, value in state.items():
                self.assertTrue(torch.equal(value, after["state"][index][name]), name)

    def test_a_step_in_parts_has_the_bits_of_one_and_moves_the_state_of_each_part(self):
        for kind, settings in [*ELEMENTWISE, (OfAnotherShape, {}), (optim.Adafactor, {})]:
            with self.subTest(kind=kind.__name__, settings=settings):
                own, optimizer = self.made(kind, settings)
                other = copy.deepcopy(optimizer)
                copies = [p for group in other.param_groups for p in group["params"]]
                state = State(other, {}, OnHost(), list(enumerate("abcd")))
                memory = torch.zeros(state.floats)
                state.bind(memory)
                for step in range(3):
                    self.give_gradients(own, step)
                    self.give_gradients(copies, step)
                    optimizer.step()
                    if step == 0 and state.is_unmade():
                        self.step_in_parts(other, state, kind in _new_state.ELEMENTWISE)
                    else:
                        other.step()
                    state.save()
                    for one, two in zip(own, copies, strict=True):
                        self.assertTrue(torch.equal(one, two))
                        values = optimizer.state.get(one, {})
                        self.assertEqual(values.keys(), other.state.get(two, {}).keys())
                        for name, value in values.items():
                            found = other.state[two][name]
                            same = torch.equal if torch.is_tensor(value) else lambda a, b: a == b
                            self.assertTrue(same(value, found), name)

    def step_in_parts(self, optimizer, state, is_elementwise):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        lists, moved = [group["params"] for group in optimizer.param_groups], []

        def move(part):
            # No other state is in new memory.
            new = [p for p in optimizer.state if all(p is not m for m in moved)]
            self.assertTrue(all(any(p is each for each in part) for p in new))
            state.move(part)
            moved.extend(part)

        with mock.patch.object(_new_state, "_PART_LEN", 6):
            first_step(optimizer, move)
        self.assertEqual([id(p) for p in moved], [id(p) for p in parameters])
        self.assertEqual(
            [id(params) for params in lists],
            [id(group["params"]) for group in optimizer.param_groups],
        )

    def test_an_optimizer_with_a_hook_makes_one_step(self):
        own, optimizer = self.made(optim.Adam, {})
        self.give_gradients(own, 1)
        called = []
        optimizer.register_step_post_hook(lambda *_: called.append(1))
        with mock.patch.object(_new_state, "_PART_LEN", 6):
            first_step(optimizer, lambda part: called.append(len(part)))
        self.assertEqual(called, [1, 4])


def described(value):
    if not torch.is_tensor(value):
        return type(value), None, None
    return value.dtype, value.shape, value.device


if __name__ == "__main__":
    unittest.main()
