"""Tests of ``--shard-optimizer``."""

import importlib.util
import os
import pathlib
import signal
import tempfile
import unittest
from unittest import mock

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

import torch
from torch import optim

from elasticdl.torch import _new_state
from elasticdl.torch._chunks import Chunks
from elasticdl.torch._place import OnHost
from elasticdl.torch._state import State
from jobs import HERE, RunningJob, needs_elasticdl

OPTIMIZERS = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.Adam, {"foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(0.1), "amsgrad": True}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"weight_decay": 0.1}),
    (optim.Adamax, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.ASGD, {"t0": 2, "lambd": 0.1}),
    (optim.Rprop, {}),
]
SHAPES, BUFFERS, FIRST, CHUNK = [(70, 30), (30,), (), (40, 30), (3,)], 5, 37, 496
NAMES = list(enumerate([*"abcde", "frozen"]))


class Optimizers(unittest.TestCase):
    """The chunks of one worker, or of several."""

    def test_the_chunks_of_two_workers_have_the_bits_of_a_whole_optimizer(self):
        for kind, settings in OPTIMIZERS:
            # The first step is made in several parts.
            small = mock.patch.object(_new_state, "_PART_LEN", 100)
            with self.subTest(kind=kind.__name__, settings=settings), small:
                self.check(kind, settings)

    def check(self, kind, settings):
        def make(own):
            groups = {"params": own[:3]}, {"params": [*own[3:], torch.ones(2, 3)], "lr": 0.05}
            return kind(groups, **settings)

        own = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
        workers = [Half(make, [p.detach().clone() for p in own], at) for at in range(2)]
        whole = make(own)
        state = State(whole, {}, OnHost(), NAMES)
        memory = torch.zeros(state.floats)
        state.bind(memory)
        for step in range(5):
            flat = torch.randn(workers[0].end)
            unused = (2, 4) if step in (0, 3) else (4,)
            gradients = flat[FIRST:].split([p.numel() for p in own])
            for at, (parameter, gradient) in enumerate(zip(own, gradients)):
                parameter.grad = None if at in unused else (gradient / 7).view(parameter.shape)
            for group in whole.param_groups:
                group["lr"] = group["lr"] * 0.9
            whole.step()
            # The second one takes the place of another worker.
            workers[1] = workers[1].replaced() if step == 2 else workers[1]
            for worker in workers:
                worker.step(flat, unused)
            expected = torch.cat([p.detach().flatten() for p in own])
            found = workers[0].values.clone()
            for chunk in workers[1].slots:
                found[chunk : chunk + CHUNK] = workers[1].values[chunk : chunk + CHUNK]
            self.assertTrue(torch.equal(found[FIRST:], expected), step)
            self.assertTrue(torch.equal(found[:BUFFERS], workers[0].buffers))
            state.save()
        # What a checkpoint says of the two forms is enough to make one of the other.
        divided = torch.cat([merged(workers), workers[0].memory])
        of_whole = state.parts(0, lambda *_: None)
        of_divided = workers[1].parts()
        self.assertTrue(same(translated(of_divided, divided, of_whole, memory), memory))
        self.assertTrue(same(translated(of_whole, memory, of_divided, divided), divided))

    def test_what_may_not_be_element_wise_is_refused_with_the_reason(self):
        def refusal(kind, **settings):
            net = torch.nn.Linear(3, 3)
            with self.assertRaises(ValueError) as refused:
                Chunks(kind(net.parameters(), **settings), False)
            self.assertIn("--shard-optimizer can't be used", str(refused.exception))
            return str(refused.exception)

        class Mine(optim.SGD):
            pass

        for kind in optim.LBFGS, optim.Adafactor, optim.SparseAdam, Mine:
            self.assertIn(f"{kind.__name__} may need whole parameters", refusal(kind))
        self.assertIn("set fused=False", refusal(optim.AdamW, fused=True))
        self.assertIn("set differentiable=False", refusal(optim.Adam, differentiable=True))
        parameter = torch.ones(3, requires_grad=True)
        parameter.grad = torch.ones(3)
        for kind in optim.Adam, optim.Adagrad:
            opt = kind([parameter])
            opt.step()
            with self.assertRaisesRegex(ValueError, "load_state_dict"):
                Chunks(opt, False)
        opt = optim.Adam([parameter])
        opt.register_step_post_hook(print)
        with self.assertRaisesRegex(ValueError, "hooks"):
            Chunks(opt, False)


def merged(workers):
    """The state in the chunks of both, `[slots, elements]`."""
    count, slots = workers[0].end - FIRST, workers[0].chunks.slots
    found = torch.zeros(slots, count)
    for start, chunk in (pair for worker in workers for pair in worker.slots.items()):
        part = slice(max(start - FIRST, 0), max(start + CHUNK - FIRST, 0))
        if slots:
            found[:, part] = chunk.view(slots, -1)
    return found.flatten()


def translated(parts, saved, into, like):
    """A state of the parts ``into``, from one of ``parts``, as a job reads it."""
    found, by_name = torch.zeros_like(like), {name: place for name, *place in parts}
    assert by_name.keys() == {name for name, *_ in into}
    for name, at, length, fill in into:
        start, count, _ = by_name[name]
        assert count == length or fill is not None, name
        copied = min(count, length)
        found[at : at + copied] = saved[start : start + copied]
        found[at + copied : at + length] = fill or 0.0
    return found


def same(first, second):
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


class Half:
    """A worker that holds every second chunk."""

    def __init__(self, make, parameters, at):
        self.make, self.parameters, self.at = make, parameters, at
        self.optimizer = optimizer = make([p.requires_grad_() for p in parameters])
        self.chunks = Chunks(optimizer, False)
        sizes = [p.numel() for p in parameters]
        self.end = FIRST + sum(sizes)
        self.values = torch.zeros(self.end)
        self.values[FIRST:] = torch.cat([p.detach().flatten() for p in parameters])
        self.buffers = torch.zeros(BUFFERS)
        self.chunks.lay_out(FIRST, parameters)
        self.chunks.bind(self.values, BUFFERS)
        self.state = State(self.chunks.twin, {}, OnHost(), NAMES, False, optimizer.param_groups)
        self.memory = torch.zeros(self.state.floats)
        self.state.bind(self.memory)
        self.slots = {}
        for start in list(range(0, self.end, CHUNK))[at::2]:
            with_state = min(start + CHUNK, self.end) - max(start, FIRST)
            self.slots[start] = torch.zeros(max(1, self.chunks.slots * with_state))

    def step(self, flat, unused):
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        sums = {start: flat[start : start + CHUNK].clone() for start in self.slots}
        chunks = [
            (start, len(sums[start]), slots.data_ptr(), sums[start].data_ptr())
            for start, slots in self.slots.items()
        ]
        with torch.no_grad():
            self.chunks.step(chunks, 7, 7, None, lambda at: at in unused)
            self.buffers += flat[:BUFFERS] / 7
        self.state.save()

    def parts(self):
        own = [p for group in self.optimizer.param_groups for p in group["params"]]
        start = self.chunks.slots * (self.end - FIRST)
        return self.state.parts(start, lambda at, name: self.chunks.place(own[at], name))

    def replaced(self):
        """A worker with what this one has in memory."""
        other = Half(self.make, [torch.zeros_like(p) for p in self.parameters], self.at)
        other.values.copy_(self.values)
        other.buffers, other.slots = self.buffers, self.slots
        other.memory.copy_(self.memory)
        other.state.load()
        return other


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Whole jobs of real processes."""

    def run_job(self, folder, act, *, workers, seconds, options, code=0, kind="NAdam"):
        path = pathlib.Path(folder) / "ends"
        path.write_text("")
        program = [HERE / "sharded.py", seconds, path, kind]
        options = ["--deterministic", "--micro-batch", "8", *options]
        with RunningJob(program, workers=workers, batch=40, epochs=3, options=options) as job:
            act(job)
            self.assertEqual(job.wait(), code, job.text())
            self.digest = job.summary()["digest"] if code == 0 else None
        return set(path.read_text().splitlines())

    def test_workers_that_are_killed_and_jobs_that_begin_again_have_the_bits_of_one_worker(self):
        def survive(job):
            job.wait_for("a checkpoint", lambda status: status["step"] >= 5)
            self.assertGreater(job.survive_some(7, 2), 0)
            job.process.send_signal(signal.SIGTERM)

        def kill_two(job):
            workers = job.wait_for_steps()["workers"]
            pids = [worker["pid"] for worker in workers if worker.get("rank") is not None]
            for pid in pids[:2]:
                os.kill(pid, signal.SIGKILL)

        with tempfile.TemporaryDirectory() as folder:
            nothing = lambda job: None
            expected = self.run_job(folder, nothing, workers=1, seconds=0, options=[])
            self.assertEqual(len(expected), 1)
            saved = ["--checkpoint-dir", f"{folder}/saved", "--checkpoint-every", "3"]
            sharded = ["--shard-optimizer", "--min-workers", "2", *saved]
            self.run_job(folder, survive, workers=3, seconds=0.1, options=sharded, code=143)
            resumed = ["--shard-optimizer", "--resume-from", f"{folder}/saved"]
            found = self.run_job(folder, nothing, workers=2, seconds=0, options=resumed)
            self.assertEqual(found, expected)
            # Without a checkpoint, a worker that has not trained has the initial parameters.
            options = ["--shard-optimizer", "--checkpoint-dir", "none"]
            found = self.run_job(folder, kill_two, workers=3, seconds=0.1, options=options)
            self.assertEqual(found, expected)

    def test_jobs_with_the_option_and_without_it_go_on_from_each_others_checkpoints(self):
        def stop(job):
            before = job.status()["step"]
            job.wait_for("a step", lambda status: status["step"] > before + 3)
            job.process.send_signal(signal.SIGTERM)

        # The state of Adagrad begins with the optimizer, also that of frozen parameters.
        of_kind, nothing = {"kind": "Adagrad", "seconds": 0}, lambda job: None
        with tempfile.TemporaryDirectory() as folder:
            expected = self.run_job(folder, nothing, workers=1, options=[], **of_kind)
            digest = self.digest
            saved, resumed = ["--checkpoint-dir", folder], []
            slow = {**of_kind, "seconds": 0.1, "code": 143}
            for workers, option in (2, []), (3, ["--shard-optimizer"]):
                options = [*option, *saved, *resumed]
                self.run_job(folder, stop, workers=workers, options=options, **slow)
                resumed = ["--resume-from", folder]
            found = self.run_job(folder, nothing, workers=1, options=resumed, **of_kind)
            # The digest is also that of the optimizer's state.
            self.assertEqual((found, self.digest), (expected, digest))
            options = ["--shard-optimizer", *resumed]
            found = self.run_job(folder, nothing, workers=2, options=options, **of_kind)
            self.assertEqual(found, expected)


if __name__ == "__main__":
    unittest.main()
