"""Tests of jobs with several optimizers."""

import importlib.util
import subprocess
import sys
import tempfile
import textwrap
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

from jobs import HERE, RunningJob, needs_elasticdl
from snippets import run

SETUP = """
import torch, elasticdl.torch as et
from elasticdl._process import process

def setup(**options):
    process.job = None
    nets = torch.nn.ModuleList([torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)])
    job = et.join()
    job.model(nets)
    made = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
    return job, nets, made, job.sampler(24, micro_batch=4, global_batch=8, **options)

x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))

def refused(act, expected):
    try:
        act()
    except (RuntimeError, ValueError) as error:
        assert expected in str(error), error
        return
    raise AssertionError(expected)
"""


class Alone(unittest.TestCase):
    """A group of one."""

    def check(self, program):
        ended = run(SETUP + textwrap.dedent(program) + "\nprint('passed')")
        self.assertEqual(ended.stdout, "passed\n", ended.stderr)

    def test_the_state_in_memory_is_as_large_as_that_of_the_optimizer(self):
        self.check(
            """
            for make, numbers in (torch.optim.SGD, 0), (torch.optim.Adam, 2):
                process.job = None
                net, job = torch.nn.Linear(500, 100), et.join()
                job.model(net)
                opt = job.optimizer(make(net.parameters(), lr=0.1))
                for indices in job.sampler(4, micro_batch=4):
                    net(torch.ones(len(indices), 500)).sum().backward()
                    opt.step()
                state = memoryview(job._worker.started.state).nbytes
                assert 0 <= state - numbers * 4 * 50100 < 20_000, (make, state)
            """
        )

    def test_optimizers_step_together_and_each_takes_its_gradients_at_its_own_step(self):
        self.check(
            """
            job, nets, made, sampler = setup(epochs=2)
            (first, second), loss = map(job.optimizer, made), lambda net, at: net(x[at]).sum()
            saved = []
            for epoch in job.epochs():
                for indices in sampler:
                    before = [p.clone() for p in nets.parameters()]
                    loss(nets[0], indices).backward()
                    assert first.step() is False
                    assert all(map(torch.equal, before, nets.parameters()))
                    # What the second loss gives to the first net is not for its optimizer.
                    (loss(nets[1], indices) + 100 * loss(nets[0], indices)).backward()
                    step = job.step
                    committed = second.step(torch.tensor(1.0))
                    assert committed == (job.step == step + 1)
                    assert not committed or not any(map(torch.equal, before, nets.parameters()))
                    assert all(p.grad is None for p in nets.parameters())
                saved.append([each.state_dict() for each in (first, second)])
            assert job.step == 6 and job.records == 48
            assert [len(state["state"]) for state in saved[1]] == [2, 2]
            moments = [each["state"][0]["exp_avg"].norm() for each in saved[1]]
            assert moments[0] < 10 * moments[1], moments
            """
        )

    def test_what_several_optimizers_cannot_do_is_refused_by_name(self):
        self.check(
            """
            job, nets, made, sampler = setup()
            first = job.optimizer(made[0])
            refused(lambda: job.optimizer(made[0]), "a parameter is in two optimizers")
            other = lambda: job.optimizer(made[1], reduction="sum")
            refused(other, "and was 'mean' for another optimizer")
            second = job.optimizer(made[1])
            next(sampler)
            nets[0](x).sum().backward()
            refused(lambda: first.step(weight=3), "takes a weight in a job of one optimizer")
            first.step()
            refused(lambda: first.step(), "stepped twice in one micro-batch, or another one has")
            job, nets, made, sampler = setup()
            job.scaler(torch.amp.GradScaler("cpu"))
            for each in made:
                job.optimizer(each)
            refused(lambda: next(sampler), "with tables or with job.scaler() has one optimizer")
            """
        )


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Jobs with a master."""

    def test_two_optimizers_train_as_in_a_plain_loop_under_kills(self):
        import torch

        with tempfile.NamedTemporaryFile("r") as file:
            plain = [sys.executable, HERE / "optimizers.py", "0", file.name]
            subprocess.run(plain, check=True)
            (expected,) = file.readlines()
        program = [HERE / "optimizers.py", 1000, "{job}/values"]
        options = ["--shuffle", "none", "--min-workers", "2"]
        with RunningJob(program, options=options) as job:
            kills = job.survive_some(2, 2)
            context = f"{kills} kills\n{job.text()}"
            self.assertEqual(job.wait(), 0, context)
            records = job.summary()["records"]
            self.assertEqual((records["counted"], records["repeated"]), (1920, 0), context)
            found = (job.path / "values").read_text().splitlines()
        plain = torch.tensor([float(value) for value in expected.split()])
        for line in found:
            values = torch.tensor([float(value) for value in line.split()])
            self.assertLess((values - plain).abs().max(), 1e-4, context)


if __name__ == "__main__":
    unittest.main()
