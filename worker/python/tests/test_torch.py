"""Tests with PyTorch. ``.ci/python`` installs it once, in a folder that is used again."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

from jobs import HERE, CountingTest, RunningJob, needs_elasticdl
from snippets import run

PARITY = """
import sys
import tempfile
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_num_threads(1)
features, classes, micro, batch, epochs = 20, 3, 8, 24, 2
x = torch.randn(120, features)
y = (x @ torch.randn(features, classes)).argmax(1)
net = torch.nn.Sequential(
    torch.nn.Linear(features, 16), {middle} torch.nn.ReLU(), torch.nn.Linear(16, classes)
)
criterion = torch.nn.CrossEntropyLoss()
make = lambda: {optimizer}
data = TensorDataset(x, y)

import elasticdl.torch as et
plain = __import__("copy").deepcopy(net)
job = et.join()
model = job.model(net)
inner = make()
opt = job.optimizer(inner)
schedule = torch.optim.lr_scheduler.StepLR(inner, 3, 0.5)
job.state("schedule", schedule, on_commit=schedule.step)
sampler = job.sampler(len(data), micro_batch=micro, global_batch=batch, epochs=epochs, seed=4)
order, commits = [], 0


class Recorded:
    def __iter__(self):
        for indices in sampler:
            order.append(indices)
            yield indices


loader = DataLoader(data, batch_sampler=Recorded())
for epoch in job.epochs():
    assert epoch == job.epoch == len(order) // 15
    for a, b in loader:
        loss = criterion(model(a), b)
        loss.backward()
        commits += opt.step(loss)
        opt.zero_grad()
assert commits == job.step == epochs * 5, commits

trained, net = net, plain
inner = make()
schedule = torch.optim.lr_scheduler.StepLR(inner, 3, 0.5)
for at in range(0, len(order), 3):
    for indices in order[at : at + 3]:
        (criterion(net(x[indices]), y[indices]) * len(indices) / batch).backward()
    inner.step()
    schedule.step()
    inner.zero_grad()
worst = 0.0
for (name, a), b in zip(trained.state_dict().items(), net.state_dict().values()):
    worst = max(worst, float((a.float() - b.float()).abs().max()))
print("worst", worst)
assert worst < 2e-6, worst
"""

REFUSALS = (
    ("job.model(3)", "takes a torch.nn.Module, not int"),
    ("job.model(torch.nn.Linear(2, 2).double())", "parameters must be torch.float32"),
    ("job.optimizer(None)", "takes a torch.optim.Optimizer, not NoneType"),
    ("job.optimizer(sgd, reduction='max')", "must be 'mean' or 'sum'"),
    ("job.optimizer(sgd, clip_norm=0)", "clip_norm is 0; it must be above 0"),
    ("job.state('x', 3)", "int has no state_dict()"),
    ("next(job.sampler(3))", "call job.model() before"),
    ("job.model(net); next(job.sampler(3))", "call job.optimizer() before"),
    (
        "job.model(net); job.optimizer(torch.optim.LBFGS(net.parameters())); next(job.sampler(3))",
        "LBFGS is not supported: its step() needs a closure",
    ),
    (
        "job.model(torch.nn.Linear(2, 2)); job.optimizer(sgd); next(job.sampler(3))",
        "has a parameter that the module of job.model() does not have",
    ),
    (
        "job.model(net); o = job.optimizer(sgd); next(job.sampler(3)); o.step(lambda: 1)",
        "closures, as of LBFGS, are not supported",
    ),
    (
        "job.model(net); job.optimizer(sgd); s = job.sampler(3); next(s); s.commit()",
        "trained by opt.step(), not by commit()",
    ),
    ("job.model(net); job.model(net)", "a job trains one module; call job.model() once"),
    ("job.optimizer(sgd); job.optimizer(sgd)", "a parameter is in two optimizers"),
    (
        "job.model(net); o = job.optimizer(sgd); next(job.sampler(3)); o.load_state_dict({})",
        "load_state_dict() must be called before the first micro-batch",
    ),
    (
        "job.model(net); o = job.optimizer(sgd); next(job.sampler(3)); o.add_param_group({})",
        "add_param_group() must be called before the first micro-batch",
    ),
    ("job.state('s', torch.amp.GradScaler('cpu'))", "use the one that job.scaler(scaler)"),
    ("job.scaler(3)", "takes a torch.amp.GradScaler, not int"),
    ("job.optimizer(sgd, overlap=3)", "overlap is 3; it must be a bool"),
    (
        "s = torch.amp.GradScaler('cpu'); job.model(net); o = job.optimizer(sgd); next(job."
        + "sampler(3)); s.scale(net(torch.ones(1, 2)).sum()).backward(); s.step(o)",
        "use the one that job.scaler(scaler) returns",
    ),
    ("job.seed_for(record=1, step=2)", "either record or step"),
    ("job.sampler(3); job.seed_for(record=1)", "no micro-batch is computed now"),
    (
        "job.model(net); job.optimizer(sgd); next(job.sampler(3)); et.Dropout()(torch.ones(9, 2))",
        "its first dimension must be the 3 records",
    ),
)


class Alone(unittest.TestCase):
    """A group of one, beside the plain loop."""

    def parity(self, optimizer, middle=""):
        ended = run(PARITY.format(optimizer=optimizer, middle=middle))
        self.assertEqual(ended.returncode, 0, ended.stderr)

    def test_adamw_is_as_in_a_plain_loop(self):
        self.parity("torch.optim.AdamW(net.parameters(), lr=1e-2)")

    def test_sgd_with_dampening_is_as_in_a_plain_loop(self):
        self.parity("torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5)")

    def test_several_groups_and_batch_norm_are_as_in_a_plain_loop(self):
        groups = "[{'params': net[0].parameters()}, {'params': net[3].parameters(), 'lr': 0.05}]"
        # Not an adaptive one: BatchNorm cancels the first bias, whose gradient is rounding errors.
        self.parity(
            f"torch.optim.SGD({groups}, lr=0.1, momentum=0.9)",
            "torch.nn.BatchNorm1d(16, affine=False),",
        )

    def test_misuse_is_refused_with_the_reason(self):
        program = textwrap.dedent(
            f"""
            import torch, elasticdl.torch as et
            from elasticdl._process import process
            for program, expected in {REFUSALS!r}:
                process.job = None
                job, net = et.join(), torch.nn.Linear(2, 2)
                sgd = torch.optim.SGD(net.parameters(), lr=0.1)
                try:
                    exec(program)
                except (RuntimeError, TypeError, ValueError) as error:
                    assert expected in str(error), (program, error)
                    continue
                raise AssertionError(program)
            print("all refused")
            """
        )
        ended = run(program)
        self.assertIn("all refused", ended.stdout, ended.stderr)

    def test_a_mask_of_infinite_elements_stays_as_it_is(self):
        program = textwrap.dedent(
            """
            import torch, elasticdl.torch as et
            net, job = torch.nn.Linear(2, 2), et.join()
            mask = torch.triu(torch.full((3, 3), float("-inf")), 1)
            net.register_buffer("mask", mask.clone())
            net.register_buffer("calls", torch.zeros(()))
            job.model(net)
            opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            for _ in job.sampler(8, micro_batch=2, global_batch=4):
                net.calls += 1
                loss = (net(torch.ones(3, 2)).T @ net.mask.exp()).sum()
                loss.backward()
                opt.step(loss)
            assert torch.equal(net.mask, mask) and net.weight.isfinite().all(), net.mask
            assert job.step == 2 and net.calls == 4, net.calls
            print("done")
            """
        )
        ended = run(program)
        self.assertEqual(ended.stdout, "done\n", ended.stderr)

    def test_tied_parameters_and_prefetching_workers(self):
        program = textwrap.dedent(
            """
            import torch, elasticdl.torch as et
            from torch.utils.data import DataLoader, TensorDataset
            net = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
            net["b"].weight = net["a"].weight
            job = et.join()
            job.model(net)
            opt = job.optimizer(torch.optim.AdamW(net.parameters()), clip_norm=1.0)
            data = TensorDataset(torch.randn(90, 4))
            sampler = job.sampler(90, micro_batch=4, global_batch=12, epochs=3)
            loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
            assert len(loader) == 8
            for epoch in job.epochs():
                for (x,) in loader:
                    loss = net["b"](net["a"](x).relu()).square().mean()
                    loss.backward()
                    opt.step(loss)
                    net.zero_grad()
                assert job.step == 8 * (epoch + 1), (epoch, job.step)
            assert job.records == 270 and job.step == 24, (job.records, job.step)
            assert net["b"].weight is net["a"].weight
            print("done")
            """
        )
        ended = run(program)
        self.assertEqual(ended.stdout, "done\n", ended.stderr)


# Of the parameters of a linear layer, and their places in it.
NAMES = list(enumerate(["weight", "bias"]))


class StateTest(unittest.TestCase):
    """The state that a joining worker receives."""

    def test_state_that_is_made_lazily_is_restored_in_another_process(self):
        import torch
        from elasticdl.torch._place import OnHost
        from elasticdl.torch._state import State

        def setup():
            torch.manual_seed(0)
            net = torch.nn.Linear(3, 2)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.5)
            state = State(optimizer, {"schedule": schedule}, OnHost(), NAMES)
            memory = torch.zeros(state.floats)
            state.bind(memory)
            return net, optimizer, schedule, state, memory

        net, optimizer, schedule, state, memory = setup()
        state.load()
        self.assertEqual(len(optimizer.state), 0, "zeros are the state before the first step")
        net.bias.grad = torch.tensor([0.5, -0.25])
        for _ in range(2):
            optimizer.step()
            schedule.step()
            state.save()
        self.assertEqual(list(optimizer.state), [net.bias], "the weight had no gradient")

        other_net, other, other_schedule, other_state, other_memory = setup()
        other_memory.copy_(memory)
        other_state.load()
        self.assertEqual(other.param_groups[0]["lr"], optimizer.param_groups[0]["lr"])
        self.assertEqual(other_schedule.state_dict(), schedule.state_dict())
        self.assertEqual(list(other.state), [other_net.bias])
        for name, value in optimizer.state[net.bias].items():
            self.assertTrue(torch.equal(value, other.state[other_net.bias][name]), name)
        before = other_memory.clone()
        other_state.save()
        self.assertTrue(torch.equal(before.view(torch.int32), other_memory.view(torch.int32)))

    def test_equal_states_have_equal_bytes_whatever_settings_they_had_before(self):
        import torch
        from elasticdl.torch._place import OnHost
        from elasticdl.torch._state import State

        memories = []
        for rates in [0.1], [0.1234567891, 0.1]:
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
            state = State(optimizer, {}, OnHost(), NAMES)
            memories.append(torch.zeros(state.floats))
            state.bind(memories[-1])
            for optimizer.param_groups[0]["lr"] in rates:
                state.save()
        self.assertTrue(torch.equal(*(memory.view(torch.int32) for memory in memories)))

    def test_a_state_that_a_later_step_makes_is_refused(self):
        import torch
        from elasticdl.torch._place import OnHost
        from elasticdl.torch._state import State

        net = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state = State(optimizer, {}, OnHost(), NAMES)
        state.bind(torch.zeros(state.floats))
        optimizer.param_groups[0]["momentum"] = 0.9
        state.save()
        net(torch.ones(3)).sum().backward()
        optimizer.step()
        with self.assertRaisesRegex(RuntimeError, "has made a state 'momentum_buffer' that"):
            state.save()

    def test_objects_that_cannot_be_sent_are_refused(self):
        import torch
        from elasticdl.torch._place import OnHost
        from elasticdl.torch._state import State, decode, encode

        class Odd:
            def state_dict(self):
                return {"file": object()}

        net = torch.nn.Linear(3, 2)
        with self.assertRaisesRegex(TypeError, r"job.state\('odd'\) has a object"):
            State(torch.optim.SGD(net.parameters()), {"odd": Odd()}, OnHost(), NAMES)
        value = {"a": (1, [2.5, None]), 3: torch.arange(4), "e": torch.empty(0, 2)}
        again = decode(__import__("json").loads(__import__("json").dumps(encode(value, "it"))))
        self.assertEqual(again["a"], value["a"])
        self.assertTrue(torch.equal(again[3], value[3]) and again["e"].shape == (0, 2))


@needs_elasticdl
class Jobs(CountingTest):
    """Jobs with a master."""

    RECORDS, EPOCHS = 2000, 2

    def test_an_exception_in_a_loop_of_several_workers_is_that_of_the_program(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "program.py"
            program.write_text(
                "import torch, elasticdl.torch as et\n"
                "net, job = torch.nn.Linear(2, 1), et.join()\n"
                "job.model(net)\n"
                "opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))\n"
                "for indices in job.sampler(40, micro_batch=5):\n"
                "    raise ValueError('no loss')\n"
            )
            options = ["--max-worker-restarts", "0", "--min-workers", "2"]
            with RunningJob([program], workers=2, batch=10, epochs=1, options=options) as job:
                self.assertEqual(job.wait(), 1, job.text())
                self.assertRegex(job.summary()["error"], r"worker \d failed: ValueError: no loss \(")

    def test_records_count_once_under_kills_with_prefetching_workers(self):
        # Without them: test_gpu.
        program = [HERE / "count_torch.py", self.RECORDS, 3000, "{job}/counts", 2]
        # The first worker must not finish while the others still load PyTorch.
        options = ["--min-workers", "2"]
        for seed in range(int(os.environ.get("ELASTICDL_PYTHON_SCHEDULES", "1"))):
            with RunningJob(program, epochs=self.EPOCHS, options=options) as job:
                kills = job.survive_some(seed, 3, (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
                self.check(job, f"seed {seed}, {kills} kills")
                self.assertGreater(kills, 0, f"seed {seed}: too fast to be disturbed")

    def test_means_are_those_of_the_plain_loop_alone_and_in_a_group(self):
        with tempfile.TemporaryDirectory() as folder:
            plain = pathlib.Path(folder) / "plain"
            run = [sys.executable, HERE / "means.py", "0", plain]
            self.assertEqual(subprocess.run(run, check=False).returncode, 0)
            expected = [float(value) for value in plain.read_text().split()]
        program = [HERE / "means.py", 20000, "{job}/values"]
        # Trains alone, as a group, and alone again until the replacement comes.
        options = ["--shuffle", "none"]
        with RunningJob(program, workers=1, batch=48, epochs=2, options=options) as job:
            job.wait_for_steps()
            self.assertEqual(job.command("scale", "--num-workers", "2").returncode, 0)
            kills = job.survive_some(7, 1)
            self.assertEqual((job.wait(), kills), (0, 1), job.text())
            for line in (job.path / "values").read_text().splitlines():
                worst = max(abs(float(a) - b) for a, b in zip(line.split(), expected, strict=True))
                self.assertLess(worst, 1e-5, job.text())


if __name__ == "__main__":
    unittest.main()
