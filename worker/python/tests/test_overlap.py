"""Tests of gradients that are summed during the backward pass, of scaled losses, and of sums that
do not depend on the workers, with PyTorch."""

import importlib.util
import os
import pathlib
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

from jobs import HERE, CountingTest, RunningJob, needs_elasticdl
from snippets import run

SETUP = """
import torch
import elasticdl.torch as et
from elasticdl.torch import _training
_training._BUCKET_LEN = 7

def setup(overlap, scaled=False):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    job = et.join()
    job.model(net)
    opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.5), overlap=overlap)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaled)
    return job, net, opt, job.scaler(scaler)

x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
def loss_of(net, indices):
    return net(x[indices]).square().mean()
def parameters(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])
"""


class Alone(unittest.TestCase):
    """A group of one."""

    def check(self, program):
        ended = run(SETUP + program + "\nprint('passed')")
        self.assertEqual(ended.stdout, "passed\n", ended.stderr)

    def refused(self, program, expected):
        ended = run(SETUP + program)
        self.assertEqual(ended.returncode, 1, ended.stdout)
        self.assertIn(expected, ended.stderr)

    def test_a_second_backward_pass_is_refused_or_adds(self):
        program = """
job, net, opt, _ = setup({overlap})
for indices in job.sampler(24, micro_batch=6, global_batch=12):
    for part in indices[:3], indices[3:]:
        (loss_of(net, part) / 2).backward()
    opt.step()
before = parameters(net)
from elasticdl._process import process
process.job = None
job, net, opt, _ = setup(True)
for indices in job.sampler(24, micro_batch=6, global_batch=12):
    loss_of(net, indices).backward()
    opt.step()
assert torch.allclose(before, parameters(net), atol=1e-6)
"""
        self.check(program.format(overlap=False))
        self.refused(program.format(overlap=True), "a parameter got a gradient a second time")

    def test_a_gradient_that_changes_after_the_backward_pass_is_refused_or_taken(self):
        program = """
job, net, opt, _ = setup({overlap})
for indices in job.sampler(12, micro_batch=12):
    loss_of(net, indices).backward()
    {change}
    opt.step()
    assert all(p.grad is None for p in net.parameters())
after = parameters(net)
assert torch.equal(after, parameters(setup_net)) == {stays}
"""
        other = "setup_net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))\n"
        other = "torch.manual_seed(0)\n" + other
        for change in "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.0)", "opt.zero_grad()":
            values = {"change": change, "stays": True}
            self.check(other + program.format(overlap=False, **values))
            self.refused(
                other + program.format(overlap=True, **values),
                "a gradient was changed or cleared between backward() and step()",
            )
        self.check(other + program.format(overlap=True, change="pass", stays=False))

    def test_gradients_outside_of_the_loop_do_not_count(self):
        self.check(
            """
results = []
from elasticdl._process import process
for outside in False, True:
    process.job = None
    job, net, opt, _ = setup(True)
    sampler = job.sampler(24, micro_batch=6, global_batch=12)
    if outside:
        loss_of(net, [1, 2]).backward()
    for indices in sampler:
        loss_of(net, indices).backward()
        opt.step()
    results.append(parameters(net))
    for _ in range(2):
        loss_of(net, [1, 2]).backward()
    assert net[0].weight.grad.abs().sum() > 0
    opt.zero_grad()
    assert net[0].weight.grad is None
assert torch.equal(*results)
"""
        )

    def test_scaled_losses_give_the_same_steps_and_an_overflow_is_left_out(self):
        self.check(
            """
from elasticdl._process import process
results = []
for bad in None, None, 5:
    process.job = None
    job, net, opt, scaler = setup(True, scaled=bool(results))
    steps, scales = [], []
    sampler = job.sampler(24, micro_batch=3, global_batch=6, shuffle=False, epochs=2)
    for indices in (indices for _ in job.epochs() for indices in sampler):
        loss = loss_of(net, indices)
        total = scaler.scale(loss)
        if bad in indices:
            total = total * float("inf")
        total.backward()
        if scaler.step(opt, loss):
            steps.append(parameters(net))
            scales.append(scaler.get_scale())
        scaler.update()
    results.append((steps, scales))
first, second, third = results
assert all(torch.equal(a, b) for a, b in zip(first[0], second[0]))
assert second[1] == [1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0, 4096.0, 4096.0]
# Record 5 is in the first step of each epoch.
assert third[1] == [512.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 512.0, 1024.0]
torch.manual_seed(0)
process.job = None
initial = parameters(setup(True)[1])
assert torch.equal(third[0][0], initial) and not torch.equal(third[0][1], initial)
"""
        )
        self.refused("_, _, opt, scaler = setup(True)\nscaler.unscale_(opt)", "use clip_norm")

    def test_an_overflow_of_an_early_micro_batch_counts_with_buffers_too(self):
        self.check(
            """
net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
job = et.join()
job.model(net)
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.5))
scaler = job.scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
before = parameters(net)
for indices in job.sampler(24, micro_batch=3, global_batch=9, shuffle=False, max_steps=1):
    loss = loss_of(net, indices)
    (scaler.scale(loss) * float("inf" if 1 in indices else 1)).backward()
    scaler.step(opt, loss)
assert job.step == 1 and scaler.get_scale() == 512.0, scaler.get_scale()
assert torch.equal(parameters(net), before)
"""
        )


@needs_elasticdl
class Jobs(CountingTest):
    """Jobs with a master."""

    RECORDS, EPOCHS = 1200, 2

    def counted(self, seed, overlap):
        program = [HERE / "count_overlap.py", self.RECORDS, 10000, "{job}/counts", overlap]
        options = ["--min-workers", "2"]
        with RunningJob(program, epochs=self.EPOCHS, options=options) as job:
            kills = job.survive_some(seed, 2)
            context = f"seed {seed}, {kills} kills, overlap {overlap}"
            self.check(job, context)
            self.assertGreater(kills, 0, f"seed {seed}: too fast to be disturbed")

    def test_buckets_count_records_once_under_kills(self):
        for seed in range(int(os.environ.get("ELASTICDL_PYTHON_SCHEDULES", "1"))):
            with self.subTest(seed=seed):
                self.counted(200 + seed, True)

    def test_gradients_that_step_takes_count_records_once_under_kills(self):
        self.counted(300, False)

    def test_a_strict_job_gives_the_same_bits_alone_and_under_kills(self):
        exports = []
        with tempfile.TemporaryDirectory() as folder:
            for workers, seed, seconds in (1, None, 0.0), (3, 400, 0.1):
                path = pathlib.Path(folder) / f"{workers}.safetensors"
                options = ["--deterministic", "--micro-batch", "8", "--export", str(path)]
                program = [HERE / "strict.py", "dropout", seconds]
                options += ["--min-workers", str(min(workers, 2))]
                with RunningJob(
                    program, workers=workers, batch=40, epochs=5, options=options
                ) as job:
                    kills = 0 if seed is None else job.survive_some(seed, 2)
                    self.assertEqual(job.wait(), 0, job.text())
                    self.assertEqual(kills > 0, seed is not None)
                exports.append(path.read_bytes())
        self.assertEqual(exports[0], exports[1])

    def test_a_strict_job_refuses_a_module_whose_buffers_are_means(self):
        options = ["--deterministic", "--max-worker-restarts", "0"]
        program = [HERE / "strict.py", "means", 0.0]
        with RunningJob(program, workers=1, batch=40, options=options) as job:
            self.assertEqual(job.wait(), 1, job.text())
            self.assertIn("such as GroupNorm", str(job.summary()))


if __name__ == "__main__":
    unittest.main()
