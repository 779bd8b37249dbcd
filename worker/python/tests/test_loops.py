"""Tests of loops that people have: what they may do, and what is refused at once and by name."""

import ast
import importlib.util
import json
import textwrap
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

from jobs import HERE, RunningJob, needs_elasticdl
from snippets import run

SETUP = """
import copy, torch, elasticdl.torch as et
from torch.utils.data import DataLoader
from elasticdl._process import process

def setup(overlap=True, **options):
    process.job = None
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    net.register_buffer("level", torch.zeros(2))
    net.ice = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    job = et.join()
    job.model(net)
    inner = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    opt = job.optimizer(inner, overlap=overlap)
    order = {"micro_batch": 4, "global_batch": 8, "epochs": 2, **options}
    sampler = job.sampler(24, **order)
    return job, net, inner, opt, DataLoader(x, batch_sampler=sampler, num_workers=loaders)

x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
loaders = 0
def backward(net, batch):
    net(batch).square().mean().backward()
"""

# What a loop does after its step in each epoch, and what the error says.
CHANGES = (
    ("net.late = torch.nn.Linear(2, 2)", "late.weight is not a parameter that the module had"),
    ("net[0] = torch.nn.Linear(3, 4)", "0.weight is not a parameter that the module had"),
    ("net[2].bias.data = torch.zeros(2)", "2.bias is in other memory than when training began"),
    ("net.load_state_dict(saved)", "the loop changed the values of "),
    ("net[2].weight.data.clamp_(-1e-3, 1e-3)", "the loop changed the values of 2.weight"),
    ("net.ice.requires_grad_()", "ice was frozen when training began and requires a gradient now"),
    ("net.level = torch.zeros(3)", "the module's buffers have 3 elements, and had 2"),
    ("del net.level", "the buffer level is gone"),
    ("opt.param_groups[0]['amsgrad'] = True", "the loop set the optimizer's amsgrad to True, and"),
    ("inner.step()", "step() of the program's own optimizer would change"),
)

# Loops, in place of the right one, and what the error says.
LOOPS = (
    ("for _ in range(2):\n    train()", "write `for epoch in job.epochs():` around it"),
    ("for _ in job.epochs():\n    train()\n    train()", "epoch 0 is complete, and this loop"),
    ("for _ in job.epochs():\n    train()\ntrain()", "epoch 1 is complete, and this loop"),
    ("for _ in job.epochs():\n    train(1)", "left in epoch 0, after step 0, before all records"),
    ("for _ in job.epochs():\n    train(2)", "left in epoch 0, after step 1, before all records"),
)


class Alone(unittest.TestCase):
    """A group of one."""

    def check(self, program, context=""):
        ended = run(SETUP + textwrap.dedent(program) + "\nprint('passed')")
        self.assertEqual(ended.stdout, "passed\n", f"{context}\n{ended.stderr}")

    def test_what_a_loop_changes_for_its_worker_alone_is_refused_at_the_next_step(self):
        self.check(
            f"""
            for change, expected in {CHANGES!r}:
                job, net, inner, opt, loader = setup()
                saved = copy.deepcopy(net.state_dict())
                try:
                    for _ in job.epochs():
                        for at, batch in enumerate(loader):
                            if at == 2:
                                exec(change)
                            backward(net, batch)
                            opt.step()
                except RuntimeError as error:
                    assert expected in str(error), (change, error)
                    assert job.step == 1, change
                    continue
                raise AssertionError(change)
            """
        )

    def test_each_epoch_of_the_job_is_one_loop_over_the_loader(self):
        self.check(
            f"""
            for loop, expected in {LOOPS!r}:
                job, net, _, opt, loader = setup()
                def train(most=None):
                    for at, batch in enumerate(loader):
                        backward(net, batch)
                        opt.step()
                        if at + 1 == most:
                            break
                try:
                    exec(loop)
                except RuntimeError as error:
                    assert expected in str(error), (loop, error)
                    continue
                raise AssertionError(loop)
            job, net, _, opt, loader = setup(epochs=1)
            for batch in loader:
                backward(net, batch)
                opt.step()
            try:
                next(iter(loader))
            except RuntimeError as error:
                assert "the job is complete, and this loop" in str(error), error
            assert job.step == len(loader) == 3
            """
        )

    def test_an_epoch_has_its_records_once_and_they_are_committed_at_its_end(self):
        self.check(
            """
            for loaders in 0, 2:
                job, net, _, opt, loader = setup(epochs=3)
                epochs = []
                for epoch in job.epochs():
                    seen = 0
                    for batch in loader:
                        seen += len(job.micro_batch)
                        assert {record.epoch for record in job.micro_batch} == {epoch}
                        backward(net, batch)
                        opt.step()
                    epochs.append((epoch, job.step, job.records))
                    # A loader with workers gets a part of an epoch's last step again.
                    assert seen == 24 if loaders == 0 else 24 <= seen <= 28, seen
                assert epochs == [(0, 3, 24), (1, 6, 48), (2, 9, 72)], epochs
            job, net, _, opt, loader = setup(max_steps=4)
            assert [sum(opt.step() for _ in loader) for _ in job.epochs()] == [3, 1]
            """
        )

    def test_gradient_accumulation_of_tutorials_is_refused_at_the_second_micro_batch(self):
        self.check(
            """
            for loaders in 0, 2:
                for overlap in False, True:
                    job, net, _, opt, loader = setup(overlap)
                    try:
                        for _ in job.epochs():
                            for at, batch in enumerate(loader):
                                (net(batch).square().mean() / 2).backward()
                                if at % 2:
                                    opt.step()
                                    opt.zero_grad()
                    except RuntimeError as error:
                        assert "call opt.step() after each backward()" in str(error), error
                        assert job.step == 0
                        continue
                    raise AssertionError((loaders, overlap))
            loaders = 0
            job, net, _, opt, loader = setup()
            try:
                for _ in job.epochs():
                    for at, batch in enumerate(loader):
                        if at != 1:
                            backward(net, batch)
                            opt.step()
            except RuntimeError as error:
                assert "the one before has had no opt.step()" in str(error), error
            assert job.step == 0
            """
        )

    def test_a_parameter_without_gradient_stays_as_in_a_plain_loop(self):
        self.check(
            """
            class Net(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.used, self.unused = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
                    self.frozen = torch.nn.Linear(3, 2)
                    self.late = torch.nn.Linear(3, 2).requires_grad_(False)
                def forward(self, batch):
                    return self.used(batch) + self.frozen(batch) * self.late(batch)
                def turn(self, epoch):
                    self.frozen.requires_grad_(epoch == 0)
                    self.late.requires_grad_(epoch == 1)

            for micro in 4, 8:
                torch.manual_seed(0)
                net = Net()
                plain = copy.deepcopy(net)
                process.job = None
                job = et.join()
                job.model(net)
                make = lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
                opt = job.optimizer(make(net), unfreezes=True)
                order = {"micro_batch": micro, "global_batch": 8, "epochs": 3, "shuffle": False}
                sampler = job.sampler(24, **order)
                for epoch in job.epochs():
                    net.turn(epoch)
                    for indices in sampler:
                        backward(net, x[indices])
                        opt.step()
                opt = make(plain)
                for epoch in range(3):
                    plain.turn(epoch)
                    for at in range(0, 24, 8):
                        backward(plain, x[at : at + 8])
                        opt.step()
                        opt.zero_grad()
                for (name, a), b in zip(net.named_parameters(), plain.parameters()):
                    assert torch.allclose(a, b, atol=1e-6), (micro, name)
            """
        )

    def test_buffers_are_sent_as_they_are_and_those_that_cannot_be_are_left_alone(self):
        self.check(
            """
            job, net, inner, opt, loader = setup()
            turns = torch.polar(torch.ones(4), torch.arange(4.0))
            fine, large = torch.full((2,), 0.1).double() / 3, torch.tensor([(1 << 60) + 1, 3])
            for name, buffer in ("turns", turns), ("fine", fine), ("large", large):
                net.register_buffer(name, buffer.clone())
            try:
                for epoch in job.epochs():
                    if epoch:
                        assert torch.equal(net.turns, turns) and torch.equal(net.large, large)
                        assert torch.equal(net.fine, fine)
                        assert net.level.tolist() == [2 - 2.0**-5] * 2, net.level
                        net.large += 1
                    for batch in loader:
                        # Another tensor in its place, as some modules do it.
                        net.level = 0.5 * net.level + 1
                        backward(net, batch)
                        opt.step()
            except RuntimeError as error:
                assert "large has changed, and its elements (torch.int64)" in str(error), error
            assert job.step == 3
            """
        )

    def test_a_step_with_weights_is_the_same_however_its_records_are_divided(self):
        self.check(
            """
            import weights
            for reduction in "mean", "sum":
                for overlap in False, True:
                    for micro in 64, 16, 4, 1:
                        process.job = None
                        found = weights.train(micro, reduction, overlap, alone=True)
                        worst = (found - weights.plain()).abs().max()
                        assert worst < 1e-5, (reduction, overlap, micro, worst)
            for wrong, expected in (
                (lambda at: -1.0, "weight is -1.0; it must be finite, and at least 0"),
                (lambda at: float("nan"), "weight is nan"),
                (lambda at: None if at else 1.0, "a weight for some micro-batches only"),
                (lambda at: 1.0 if at else None, "a weight for some micro-batches only"),
                (lambda at: 0.0, "weights of all micro-batches of the step are 0"),
            ):
                job, net, _, opt, loader = setup(epochs=1)
                try:
                    for at, batch in enumerate(loader):
                        backward(net, batch)
                        opt.step(weight=wrong(at))
                except (RuntimeError, ValueError) as error:
                    assert expected in str(error), error
                    continue
                raise AssertionError(expected)
            """
        )


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Jobs with a master."""

    def test_code_after_the_loop_has_its_time_and_its_end_is_told(self):
        for seconds, options, told, is_saved in (
            (8, (), "exited with code 3 after the job was complete", True),
            (60, ("--end-timeout", "3s"), "killed 3 s after the job was complete", False),
        ):
            program = [HERE / "after_loop.py", "{job}", seconds]
            options = ["--min-workers", "2", *options]
            with RunningJob(program, workers=2, options=options) as job:
                if is_saved:
                    # A stop has nothing to stop, and says so.
                    job.wait_for("its end", lambda status: status.get("state") == "ending")
                    stopped = job.command("stop").stdout
                    self.assertIn("is over, and waits for its programs to end", stopped)
                self.assertEqual(job.wait(), 0, job.text())
                self.assertEqual(is_saved, "the job is over, and waits for" in job.text())
                self.assertIn("waits for 2 programs to end", job.text())
                self.assertIn(told, job.text())
                lines = job.text().splitlines()
                for line in "two", "lines", "loss: 0.5":
                    self.assertEqual(lines.count(line), 1, job.text())
                self.assertNotIn("not for the console", job.text())
                self.assertEqual((job.path / "final.pt").exists(), is_saved, job.text())

    def test_after_a_loop_all_workers_have_the_model_of_the_epochs_last_step(self):
        epochs, options = 60, ("--min-workers", "2")
        program = [HERE / "between_epochs.py", "{job}"]
        with RunningJob(program, workers=2, batch=8, epochs=epochs, options=options) as job:
            self.assertEqual(job.wait(), 0, job.text())
            found = [ast.literal_eval(path.read_text()) for path in job.path.glob("found-*")]
        self.assertEqual(len(found), 2)
        self.assertEqual(found[0], found[1])
        steps = [(epoch, 5 * (epoch + 1), True) for epoch in range(epochs)]
        self.assertEqual([(epoch, at, same) for epoch, at, _, same in found[0]], steps)

    def test_a_step_with_weights_is_that_of_one_worker_under_kills(self):
        import torch
        import weights

        program = [HERE / "weights.py", 4, "{job}/values"]
        options = ["--shuffle", "none", "--min-workers", "3"]
        with RunningJob(program, workers=3, batch=64, epochs=3, options=options) as job:
            kills = job.survive_some(3, 2)
            context = f"{kills} kills\n{job.text()}"
            self.assertEqual(job.wait(), 0, context)
            for line in (job.path / "values").read_text().splitlines():
                worst = (torch.tensor(json.loads(line)) - weights.plain()).abs().max()
                self.assertLess(worst, 1e-5, context)


if __name__ == "__main__":
    unittest.main()
