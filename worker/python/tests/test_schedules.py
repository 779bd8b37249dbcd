"""Tests of learning-rate schedulers, which step with the commits of the group."""

import contextlib
import importlib.util
import json
import pathlib
import tempfile
import textwrap
import types
import unittest
import warnings

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

import rates
import torch
from jobs import HERE, RunningJob, needs_elasticdl
from snippets import run

# Each is a loop's body, or what is before it, and what the error says.
REFUSALS = (
    ("s = lr.StepLR(opt, 3)", "", "did not call StepLR.step() after the last epoch"),
    ("s = lr.StepLR(opt, 3)", "s.step(); s.step()", "StepLR.step() was called at another place"),
    ("s = lr.StepLR(opt, 3)", "s.step(3)", "StepLR.step() takes no argument in a job"),
    (
        "s = lr.StepLR(opt, 3); t = lr.StepLR(opt, 4)",
        "t.step(); s.step()",
        "in the order in which the schedulers were made",
    ),
    (
        "s = lr.StepLR(opt, 3); job.state('s', s, on_epoch=s.step)",
        "s.step()",
        "is called by another scheduler or by a function of job.state()",
    ),
    (
        "s = lr.StepLR(opt, 3); job.state('x', s.__class__(inner, 1), on_commit=lambda: s.step())",
        "s.step()",
        "StepLR.step() was called by a function of job.state() of another object",
    ),
    ("s = lr.ReduceLROnPlateau(opt)", "s.step(1.0)", "was called at another place than once"),
    ("s = lr.ReduceLROnPlateau(opt)", "s.step(1.0, 3)", "takes one argument in a job, its metric"),
    ("s = lr.ReduceLROnPlateau(opt)", "", "did not call ReduceLROnPlateau.step() after the last"),
    ("", "opt.param_groups[0]['lr'] /= 2", "the loop set nothing and then lr to 0.05 in one"),
    ("", "opt.param_groups[0]['lr'] = inner", "the optimizer's lr has a SGD in its state"),
    ("", "lr.StepLR(opt, 3)", "had no initial_lr when training began"),
    (
        "",
        "inner.add_param_group({'params': [torch.nn.Parameter(torch.ones(2))]})",
        "the optimizer has other parameters than when training began",
    ),
)

SINGLE = (
    "lr.StepLR(opt, 3, 0.5)",
    "lr.LambdaLR(opt, lambda step: 1 / (1 + step))",
    "lr.OneCycleLR(opt, 0.5, total_steps=40)",
    "lr.CyclicLR(opt, 0.01, 0.1, 4)",
    "lr.CosineAnnealingWarmRestarts(opt, 5)",
    "lr.ChainedScheduler([lr.ConstantLR(opt, 0.1, 4), lr.ExponentialLR(opt, 0.9)])",
    "torch.optim.swa_utils.SWALR(opt, 0.01, 3)",
)


class Alone(unittest.TestCase):
    """A group of one."""

    def check(self, program):
        ended = run(textwrap.dedent(program))
        self.assertEqual(ended.stdout, "done\n", ended.stderr)

    def test_a_schedule_steps_once_with_each_step_and_once_with_each_epoch(self):
        with tempfile.TemporaryDirectory() as folder:
            for where in "loop", "state":
                path = pathlib.Path(folder, where)
                arguments = 0, str(path), where, 3
                self.check(f"import rates; rates.main(*{arguments!r}); print('done')")
                self.assertEqual(json.loads(path.read_text()), rates.plain(39, 13))

    def test_every_scheduler_of_pytorch_has_the_rates_of_the_plain_loop(self):
        self.check(
            f"""
            import torch, torch.optim.lr_scheduler as lr, elasticdl.torch as et
            from elasticdl._process import process
            for made in {SINGLE!r}:
                for is_plain in True, False:
                    process.job = None
                    net, job = torch.nn.Linear(3, 2), et.join()
                    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
                    if not is_plain:
                        job.model(net)
                        opt = job.optimizer(opt)
                    scheduler = eval(made)
                    rates = []
                    options = {{"micro_batch": 2, "global_batch": 4}}
                    for at in range(24) if is_plain else job.sampler(96, **options):
                        net(torch.ones(2, 3)).sum().backward()
                        if opt.step() or is_plain:
                            group = opt.param_groups[0]
                            scheduler.step()
                            rates.append((scheduler.get_last_lr(), group["lr"], group["momentum"]))
                        opt.zero_grad()
                    if is_plain:
                        expected = rates
                assert len(rates) == 24 and rates == expected, (made, rates, expected)
            print("done")
            """
        )

    def test_what_would_depend_on_the_micro_batches_of_a_worker_is_refused(self):
        self.check(
            f"""
            import torch, torch.optim.lr_scheduler as lr, elasticdl.torch as et
            from elasticdl._process import process
            for before, body, expected in {REFUSALS!r}:
                process.job = None
                net, job = torch.nn.Linear(3, 2), et.join()
                inner = torch.optim.SGD(net.parameters(), lr=0.1)
                job.model(net)
                opt = job.optimizer(inner)
                exec(before)
                try:
                    sampler = job.sampler(96, micro_batch=2, global_batch=4, epochs=2)
                    for _ in (indices for _ in job.epochs() for indices in sampler):
                        net(torch.ones(2, 3)).sum().backward()
                        opt.step()
                        exec(body)
                except (RuntimeError, TypeError, ValueError) as error:
                    assert expected in str(error), (before, body, error)
                    continue
                raise AssertionError((before, body))
            print("done")
            """
        )


class Settings(unittest.TestCase):
    """What workers tell each other about settings, without processes."""

    def test_the_oldest_worker_decides_and_one_that_differs_stops(self):
        from elasticdl._worker import Delivered
        from elasticdl.torch._settings import Settings

        opts = [torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(3)]
        workers = []
        for opt, number in zip(opts, (10, 9, 11), strict=True):
            core = types.SimpleNamespace(id=number)
            workers.append(Settings(opt, types.SimpleNamespace(core=core, progress=lambda _: 7)))
        opts[0].param_groups[0].update(lr=0.3, betas=(0.5, 0.9))
        opts[1].param_groups[0].update(lr=0.3, betas=(0.5, 0.9))
        # As the loop of a worker that has just joined, with a counter of its own. The third one
        # has no part in the step.
        opts[0].param_groups[0]["lr"] = 0.2
        opts[2].param_groups[0]["lr"] = 0.7
        tally = {workers[0].tell(): 1.0, workers[1].tell(): 1.0, "other": 2.0}
        for opt, worker in zip(opts, workers, strict=True):
            worker.begin_commit()
            worker.decide(tally)
            worker.note()
            group = opt.param_groups[0]
            self.assertEqual((group["lr"], group["betas"]), (0.3, (0.5, 0.9)))
        workers[1].end_step(Delivered(True, True))
        with self.assertRaisesRegex(RuntimeError, "lr to 0.2, .* and step 7 was made with lr to"):
            workers[0].end_step(Delivered(True, True))

    def test_steps_of_a_group_do_not_warn_where_the_loop_of_a_spare_has_not_begun(self):
        from elasticdl.torch._schedules import Schedules

        opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
        objects = types.SimpleNamespace(has_function=lambda _: False)
        schedules = Schedules(None, [opt], objects, contextlib.nullcontext)
        with warnings.catch_warnings(action="error"):
            schedules.begin_commit(0, {"scheduler 0 step": 1.0})
            schedules.commit()
        self.assertEqual(scheduler.last_epoch, 1)

    def test_a_plateau_is_that_of_the_mean_of_the_metrics_by_records(self):
        from elasticdl.torch._schedules import _mean_of

        # Of one value not a bit changes.
        tally = {"metric 0 2.5": 16.0, "metric 0 4.0": 32.0, "metric 1 0.1": 48.0, "other": 3.0}
        found = [_mean_of(f"metric {at} ", tally) for at in range(3)]
        self.assertEqual(found, [3.5, 0.1, None])


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Jobs with a master."""

    EPOCHS, STEPS_PER_EPOCH = 3, 13

    def check(self, job, context):
        code = job.wait()
        self.assertEqual(code, 0, f"{context}\n{job.text()}")
        lines = [json.loads(line) for line in (job.path / "rates").read_text().splitlines()]
        self.assertGreater(len(lines), 0, context)
        expected = rates.plain(self.EPOCHS * self.STEPS_PER_EPOCH, self.STEPS_PER_EPOCH)
        for line in lines:
            self.assertEqual(line, expected, context)

    def job(self, workers, micros, where, *options, epochs=EPOCHS):
        program = [HERE / "rates.py", micros, "{job}/rates", where]
        return RunningJob(
            program, workers=workers, batch=rates.BATCH, epochs=epochs, options=options
        )

    def test_rates_are_those_of_the_plain_loop_in_a_group_that_loses_workers(self):
        # The objects that are called, in the state; the loop calls them in the test of a resume.
        with self.job(3, 4000, "state", "--min-workers", "2") as job:
            job.wait_for_steps()
            kills = job.survive_some(5, 2)
            self.check(job, f"{kills} kills")
            self.assertGreater(kills, 0)

    def test_rates_are_those_of_the_plain_loop_after_a_resume(self):
        with tempfile.TemporaryDirectory() as folder:
            # The second epoch has begun, so that all schedulers have stepped.
            saved = ["--checkpoint-dir", folder, "--checkpoint-every", "5"]
            with self.job(2, 0, "loop", *saved, "--max-steps", "20") as first:
                self.assertEqual(first.wait(), 0, first.text())
            with self.job(1, 0, "loop", "--resume-from", folder) as second:
                self.check(second, "resumed")


if __name__ == "__main__":
    unittest.main()
