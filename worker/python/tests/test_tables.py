"""Tests of embedding tables with PyTorch."""

import collections
import csv
import importlib.util
import json
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

from jobs import ELASTICDL, HERE, RunningJob, needs_elasticdl
from snippets import run

# The same training with tables and with torch.nn.EmbeddingBag, whose rows are those with which the
# tables began. A row of one number has one accumulator in Adagrad, as row-wise Adagrad has.
# SparseAdam adds its epsilon elsewhere.
PARITY = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import elasticdl.torch as et

torch.manual_seed(1)
torch.set_num_threads(1)
count, micro, batch = 120, 8, 24
users, words = torch.randint(-9, 9, (count,)), torch.randint(30, (count, 4))
clicks = torch.rand(count).round()


class Net(torch.nn.Module):
    def __init__(self, user, mean, total):
        super().__init__()
        self.user, self.mean, self.total = user, mean, total
        self.out = torch.nn.Linear(8, 1)

    def forward(self, users, words):
        # One table is used twice, with other ids.
        found = self.user(users), self.mean(words), self.total(words), self.total(words[:, :1] + 30)
        return self.out(torch.cat(found, 1))[:, 0]


def weight_of(words):
    return (words[:, 0] & 3).sum() / 2


def step(model, optimizers, indices, weight):
    found = model(users[indices], words[indices])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(found, clicks[indices])
    (loss * weight).backward()
    return float(loss.detach())


job = et.join()
net = Net(
    job.embedding("user", 1, optimizer=et.RowAdagrad(lr=0.1)),
    job.embedding_bag("mean", 3, optimizer=et.RowSGD(lr=0.5)),
    job.embedding_bag("total", 2, mode="sum", optimizer=et.RowAdam(0.02, (0.8, 0.9), 1e-20)),
)
job.model(net)
dense = torch.optim.SGD(net.parameters(), lr=0.1)
opt = job.optimizer(dense)
plain = Net(
    torch.nn.Embedding(18, 1),
    torch.nn.EmbeddingBag(30, 3, mode="mean"),
    torch.nn.EmbeddingBag(60, 2, mode="sum", sparse=True),
)
plain.out.load_state_dict(net.out.state_dict())
# The user -9 has row 0.
weights = [plain.user.weight.data, plain.mean.weight.data, plain.total.weight.data]
known = [set(), set(), set()]
order, losses = [], []
sampler = job.sampler(count, micro_batch=micro, global_batch=batch, epochs=3, seed=4)


class Recorded:
    def __iter__(self):
        for indices in sampler:
            # At the end of an epoch, a loader with workers gets the last one again.
            if order[-1:] != [indices]:
                order.append(indices)
            yield indices


def ids(batch):
    users, words, _ = batch
    return {"user": users, "total": [words, words[:, 0] + 30], "mean": words}


data = TensorDataset(users, words, clicks)
loaders = %d
loader = DataLoader(data, batch_sampler=Recorded(), num_workers=loaders)
for _ in job.epochs():
    for a, b, c in job.batches(loader, ids=ids):
        # Rows are there for all micro-batches of the step; those that are new have not changed yet.
        bags = torch.cat([b.reshape(-1), b[:, 0] + 30])
        found = (net.user, a), (net.mean, b.reshape(-1)), (net.total, bags)
        for at, (module, seen) in enumerate(found):
            with torch.no_grad():
                rows = module(seen) if at == 0 else module(seen[:, None])
            for id, row in zip(seen.tolist(), rows):
                if id not in known[at]:
                    known[at].add(id)
                    weights[at][id + (9 if at == 0 else 0)] = row
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(a, b), c)
        loss.backward()
        losses.append(float(loss.detach()))
        opt.step(loss, weight=weight_of(b) if loaders else None)
        opt.zero_grad()
assert job.step == 15, job.step
assert len({float(row[0]) for row in weights[1]}) > 20, "rows begin with random numbers"

optimizers = [
    torch.optim.Adagrad(plain.user.parameters(), lr=0.1, eps=1e-8),
    torch.optim.SGD([*plain.mean.parameters()], lr=0.5),
    torch.optim.SparseAdam(plain.total.parameters(), lr=0.02, betas=(0.8, 0.9), eps=1e-20),
    torch.optim.SGD(plain.out.parameters(), lr=0.1),
]
users = users + 9
expected = []
# A loader with workers draws ahead: what it draws is trained in this order.
for at in range(0, len(losses), 3):
    parts = order[at : at + 3]
    shares = [weight_of(words[part]) if loaders else len(part) for part in parts]
    for part, share in zip(parts, shares, strict=True):
        expected.append(step(plain, optimizers, part, share / sum(shares)))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
assert worst < 2e-6, (worst, losses, expected)
assert torch.allclose(net.out.weight, plain.out.weight, atol=2e-6)
assert losses[-3:] != losses[:3]
print("the same", worst)
"""

# What is done after tables "user" and "word" are declared, a net is made, and a job of 6 records.
REFUSALS = (
    ("job.embedding(3, 4)", "the name of a table is 3; it must be a str"),
    ("job.embedding('user', 4)", "the job has a table 'user' already"),
    ("job.embedding('x', 0)", "dim is 0; it must be at least 1"),
    ("job.embedding('x', 2.0)", "dim is 2.0; it must be an int"),
    ("job.embedding('x', 2, optimizer=torch.optim.SGD)", "rows are changed by RowAdagrad"),
    ("job.embedding_bag('x', 2, mode='max')", "mode is 'max'; it must be 'mean' or 'sum'"),
    ("job.embedding('x', 2, bound=-1.0); next(draw())", "initial values of ±-1"),
    ("job.embedding('x', 2, admitted_after=0)", "admitted_after is 0; it must be at least 1"),
    ("job.embedding('x', 2, evicted_after=1 << 32)", "it must be below 2**32"),
    ("job.embedding_bag('x', 2, evicted_below=-1)", "evicted_below is -1; it must be a number"),
    ("job.embedding('x', 2, optimizer=et.RowSGD(lr=-1.0)); next(draw())", "table \"x\""),
    ("job.embedding('x', 1 << 20); next(draw())", "rows of 1048576 numbers"),
    ("next(draw()); job.embedding('x', 2)", "the table 'x' must be called before the first"),
    ("job.batches(draw(), None)", "ids is None; it must be a function of a batch"),
    ("net.user(one)", "no rows of table 'user' are there"),
    ("next(draw()); net.user(one)", "no rows of table 'user' are there"),
    ("next(draw()); opt.step()", "is trained in a loop over job.batches(loader, ids=…)"),
    ("next(draws(lambda batch: {'user': one})); None", "it must return a dict with the ids of"),
    ("next(draws(lambda batch: one)); None", "['user', 'word']"),
    ("next(draws(word=one.float())); None", "the ids of table 'word' are torch.float32"),
    ("next(draws(word=[[1, 2, 3]])); None", "the ids of table 'word' are list"),
    ("next(draws(word=one[:2])); None", "have the shape [2]; their first dimension must be the 3"),
    ("next(draws(word=(one, one[:2]))); None", "offsets of the shape [2]"),
    ("next(draws(word=(one, one + 1))); None", "there is one offset per record, from 0"),
    (
        "next(draws(word=(one, torch.tensor([0, 3, 1])))); None",
        "offsets grow from 0 to at most the number of ids",
    ),
    ("next(draws()); net.user(one + 5)", "id 5 of table 'user' is not among the ids of this step"),
    ("loop = draws(); next(loop); next(loop)", "each batch of job.batches() needs its own"),
    ("next(draws()); opt.step(); net.user(one)", "no rows of table 'user' are there"),
    ("next(draws(loader=[1])); None", "that was not drawn from job.sampler()"),
    ("net.state_dict()", "table 'user' has no state_dict(): the workers divide its rows"),
    ("net.load_state_dict({})", "table 'user' loads no state_dict()"),
    ("et.load(net, 'x')", "table 'user' loads no rows from a file"),
    ("copy.deepcopy(net)", "table 'user' can't be copied or pickled"),
    ("torch.save(net, io.BytesIO())", "table 'user' can't be copied or pickled"),
    ("net.half()", "can't be moved to torch.float16 on cpu"),
    ("net.to('meta')", "can't be moved to torch.float32 on meta"),
    ("next(draw(reduction='sum'))", "a job with tables takes reduction='mean'"),
    ("job.scaler(torch.amp.GradScaler('cpu')); next(draw())", "and no job.scaler()"),
)

SETUP = """
import copy, io, torch, elasticdl.torch as et
from elasticdl._process import process
one = torch.zeros(3, dtype=torch.int64)
for program, expected in {cases!r}:
    process.job = None
    job = et.join()
    net = torch.nn.ModuleDict({{
        "user": job.embedding("user", 2), "word": job.embedding_bag("word", 2),
        "out": torch.nn.Linear(2, 1),
    }})

    def draw(**settings):
        global opt
        job.model(net)
        opt = job.optimizer(torch.optim.SGD(net["out"].parameters(), lr=0.1), **settings)
        return job.sampler(6, micro_batch=3)

    def draws(ids=None, word=one, loader=None):
        sampler = draw()
        ids = ids or (lambda batch: {{"user": one, "word": word}})
        return iter(job.batches(sampler if loader is None else loader, ids))

    net.user, net.word = net["user"], net["word"]
    try:
        exec(program)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        assert expected in str(error), (program, error)
        continue
    raise AssertionError(program)
print("all refused")
"""


class Alone(unittest.TestCase):
    """A group of one."""

    def test_rows_change_as_in_torch(self):
        for loaders in 0, 2:
            ended = run(PARITY % loaders)
            self.assertEqual(ended.returncode, 0, ended.stderr)
            self.assertIn("the same", ended.stdout)

    def test_misuse_is_refused_with_the_reason(self):
        ended = run(SETUP.format(cases=REFUSALS))
        self.assertIn("all refused", ended.stdout, ended.stderr)

    def test_a_job_without_tables_has_no_batches(self):
        ended = run("import elasticdl.torch as et; et.join().batches([], print)")
        self.assertIn("is for jobs with tables, and this one has none", ended.stderr)

    def test_a_row_is_admitted_with_its_third_touch(self):
        program = textwrap.dedent(
            """
            import torch, elasticdl.torch as et
            job = et.join()
            word = job.embedding(
                "word", 1, optimizer=et.RowSGD(lr=1.0), bound=0.0, admitted_after=3,
                evicted_after=1000, evicted_below=0.0,
            )
            net = job.model(torch.nn.ModuleList([word, torch.nn.Linear(1, 1)]))
            opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            sampler = job.sampler(6, micro_batch=1)
            one, read = torch.tensor([7]), []
            for _ in job.batches(sampler, lambda batch: {"word": one}):
                found = net[0](one)
                read.append(float(found))
                # Each step adds 1.
                loss = net[1](found.detach()).sum() - found.sum()
                loss.backward()
                opt.step(loss)
            assert read == [0, 0, 0, 1, 2, 3], read
            print("done")
            """
        )
        ended = run(program)
        self.assertEqual(ended.stdout, "done\n", ended.stderr)

    def test_bags_may_be_empty_and_a_text_has_an_id(self):
        program = textwrap.dedent(
            """
            import torch, elasticdl, elasticdl.torch as et
            job = et.join()
            net = torch.nn.ModuleList([job.embedding_bag("word", 2), torch.nn.Linear(2, 1)])
            job.model(net)
            opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            none, word = torch.empty(0, dtype=torch.int64), elasticdl.id_of("word")
            assert word == elasticdl.id_of("word") != elasticdl.id_of("Word")
            assert -(2**63) <= word < 2**63
            sampler = job.sampler(4, micro_batch=2, epochs=2)
            ids = lambda indices: {"word": (none, torch.tensor([0, 0]))}
            for _ in job.epochs():
                for indices in job.batches(sampler, ids):
                    found = net[0](none, torch.tensor([0, 0]))
                    assert found.tolist() == [[0.0, 0.0]] * 2
                    loss = net[1](found).sum()
                    loss.backward()
                    opt.step(loss)
            assert job.step == 4
            print("done")
            """
        )
        ended = run(program)
        self.assertEqual(ended.stdout, "done\n", ended.stderr)

    def test_rows_are_read_without_gradients_between_draw_and_step(self):
        program = textwrap.dedent(
            """
            import torch, elasticdl.torch as et
            job = et.join()
            net = torch.nn.ModuleList([job.embedding("user", 2), torch.nn.Linear(2, 1)])
            job.model(net)
            opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            users = torch.arange(12) % 3
            for indices in job.batches(
                job.sampler(12, micro_batch=2, global_batch=6),
                ids=lambda indices: {"user": users[indices]},
            ):
                with torch.no_grad():
                    before = net[0](users[indices])
                assert not before.requires_grad
                found = net[0](users[indices])
                assert found.requires_grad and torch.equal(found, before)
                # Rows of the whole step are there; what is not trained changes nothing.
                loss = net[1](found.detach()).sum()
                loss.backward()
                opt.step(loss)
            assert job.step == 2
            print("done")
            """
        )
        ended = run(program)
        self.assertEqual(ended.stdout, "done\n", ended.stderr)


def has_checkpoint(status):
    known = status.get("checkpoints")
    return bool(known and known["newest"])


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Jobs with a master."""

    RECORDS, EPOCHS, BATCH = 960, 2, 48

    def counts(self):
        """Records of an epoch by user, and by word."""
        records = range(self.RECORDS)
        users = collections.Counter(i * i % 40 for i in records)
        words = collections.Counter((i + word) % 25 for i in records for word in range(i % 4))
        return users, words

    def check(self, job, context):
        self.assertEqual(job.wait(), 0, f"{context}\n{job.text()}")
        users, words = self.counts()
        summary = job.summary()
        touches = self.EPOCHS * (sum(users.values()) + sum(words.values()))
        self.assertEqual(
            summary["row_touches"],
            {"expected": touches, "counted": touches, "missing": 0, "repeated": 0},
            context,
        )
        # Rows as they are after the last step.
        squares = sum((self.EPOCHS * count) ** 2 for count in users.values()) / 40
        of_words = sum(self.EPOCHS * words[user % 25] for user in range(40)) / 40
        expected = {"users": self.EPOCHS * self.RECORDS / 40, "squares": squares, "words": of_words}
        last = summary["evaluations"]["all"][-1]
        self.assertEqual((last["step"], last["metrics"]), (40, expected), context)

    def job(self, micros, loaders, options=(), workers=3):
        program = [HERE / "count_rows.py", self.RECORDS, self.BATCH, micros, loaders]
        # The first worker must not finish while the others still load PyTorch.
        options = [
            *("--min-workers", str(min(2, workers)), "--validation-data", "all"),
            *("--best-metric", "users:max", *options),
        ]
        return RunningJob(program, workers=workers, epochs=self.EPOCHS, options=options)

    def test_each_touch_counts_once_under_kills(self):
        for loaders in 0, 2:
            with self.subTest(loaders=loaders), self.job(20_000, loaders) as job:
                kills = job.survive_some(loaders, most=2)
                self.check(job, f"{kills} kills, {loaders} loaders")
                self.assertGreater(kills, 0, "too fast to be disturbed")

    def test_a_job_goes_on_from_the_rows_of_a_checkpoint(self):
        options = ["--checkpoint-every", "4", "--max-steps", "18"]
        with self.job(0, 0, options) as first:
            self.assertEqual(first.wait(), 0, first.text())
            options = ["--resume-from", str(first.directory / "checkpoints")]
            with self.job(0, 0, options, workers=1) as second:
                self.check(second, "resumed")

    def test_exported_rows_are_evaluated_and_predicted(self):
        arguments = [sys.executable, HERE / "count_rows.py", self.RECORDS, self.BATCH, 0, 0]
        with tempfile.TemporaryDirectory() as folder:
            model, rows = pathlib.Path(folder, "m.safetensors"), pathlib.Path(folder, "rows")
            with self.job(0, 0, ["--export", str(model)], workers=2) as job:
                self.check(job, "exported")
                metrics = job.summary()["evaluations"]["all"][-1]["metrics"]
            for verb, options in (
                ("evaluate", []),
                ("predict", ["--predictions", rows, "--format", "csv"]),
            ):
                directory = pathlib.Path(folder, verb)
                command = [ELASTICDL, verb, "--local", "--job-dir", directory, "--model", model]
                command += ["--data", "all", "--num-workers", "2", *options, "--", *arguments]
                ended = subprocess.run(
                    [str(word) for word in command],
                    capture_output=True,
                    text=True,
                    timeout=240,
                    check=False,
                )
                self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
            evaluated = json.loads(pathlib.Path(folder, "evaluate", "summary.json").read_text())
            self.assertEqual(evaluated["metrics"], metrics)
            found = {}
            for path in rows.iterdir():
                with open(path, newline="") as file:
                    found.update({int(row["user"]): row for row in csv.DictReader(file)})
        users, words = self.counts()
        expected = {user: (2.0 * users[user], 2.0 * words[user % 25]) for user in range(40)}
        counted = {user: (float(row["records"]), float(row["word"])) for user, row in found.items()}
        self.assertEqual(counted, expected)

    def test_a_worker_with_another_table_takes_no_part(self):
        # The second worker to come finds the file that the first one has made.
        program = """
import pathlib, sys, torch, elasticdl.torch as et
job = et.join()
try:
    pathlib.Path(sys.argv[1]).touch(exist_ok=False)
    dim = 2
except FileExistsError:
    dim = 3
net = torch.nn.ModuleList([job.embedding("user", dim), torch.nn.Linear(1, 1)])
job.model(net)
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
for indices in job.batches(job.sampler(64), lambda indices: {"user": torch.tensor(indices)}):
    loss = net[0](torch.tensor(indices)).sum() + net[1].weight.sum()
    loss.backward()
    opt.step(loss)
"""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "program.py")
            path.write_text(program)
            options = ["--min-workers", "2", "--max-worker-restarts", "0"]
            program = [path, pathlib.Path(folder, "first")]
            with RunningJob(program, workers=2, batch=32, epochs=1, options=options) as job:
                self.assertNotEqual(job.wait(), 0, job.text())
                self.assertIn("it differs in its tensors", str(job.summary()))

    def test_a_strict_job_gives_the_same_bits_alone_and_under_kills(self):
        digests = []
        for workers, seconds in (1, 0.0), (3, 0.1):
            options = ["--deterministic", "--micro-batch", "8"]
            options += ["--min-workers", str(min(workers, 2))]
            program = [HERE / "strict.py", "rows", seconds]
            with RunningJob(program, workers=workers, batch=40, epochs=5, options=options) as job:
                kills = job.survive_some(400, 2) if workers > 1 else 0
                self.assertEqual(job.wait(), 0, job.text())
                self.assertEqual(kills > 0, workers > 1)
                summary = job.summary()
            self.assertEqual(summary["row_touches"]["missing"], 0)
            digests.append(summary["digest"])
        self.assertEqual(digests[0], digests[1])

    def test_a_job_whose_rows_are_lost_loads_its_checkpoint(self):
        """With one copy of each row, a kill loses rows whenever it comes, and the worker that
        remains goes back with the group, from a state with which it has computed."""
        digests = []
        for workers, seconds in (1, 0.0), (2, 0.05):
            options = ["--deterministic", "--micro-batch", "8", "--min-workers", str(workers)]
            options += ["--table-replicas", "1", "--checkpoint-every", "2"]
            program = [HERE / "strict.py", "rows", seconds]
            with RunningJob(program, workers=workers, batch=40, epochs=3, options=options) as job:
                kills = 0
                if workers > 1:
                    # Both are members from the first step on.
                    job.wait_for("a checkpoint", has_checkpoint)
                    kills = job.survive_some(5, most=1)
                self.assertEqual(job.wait(), 0, job.text())
                summary, log = job.summary(), (job.path / "log").read_text()
            digests.append(summary["digest"])
            self.assertNotRegex(log, r"worker \d+ failed: ")
            touches = summary["row_touches"]
            self.assertEqual((touches["missing"], touches["repeated"]), (0, 0), log)
        self.assertEqual(kills, 1, "too fast to be disturbed")
        self.assertGreater(summary["rows_lost"]["count"], 0, log)
        self.assertGreater(len(summary["checkpoints"]["restored"]), 0, log)
        self.assertEqual(digests[0], digests[1], log)

    def test_a_job_whose_rows_are_lost_before_a_checkpoint_begins_anew(self):
        """The memory of the worker that remains has values that were trained."""
        digests = []
        for workers, seconds in (1, 0.0), (2, 0.05):
            options = ["--deterministic", "--micro-batch", "8", "--min-workers", str(workers)]
            options += ["--table-replicas", "1", "--checkpoint-dir", "none"]
            program = [HERE / "strict.py", "rows", seconds]
            with RunningJob(program, workers=workers, batch=40, epochs=1, options=options) as job:
                kills = job.survive_some(5, most=workers - 1)
                self.assertEqual(job.wait(), 0, job.text())
                summary, log = job.summary(), (job.path / "log").read_text()
            digests.append(summary["digest"])
        self.assertEqual(kills, 1, "too fast to be disturbed")
        self.assertRegex(log, "all workers begin anew")
        self.assertEqual(digests[0], digests[1], log)

    def test_a_job_whose_only_checkpoint_is_damaged_begins_from_the_initial_values(self):
        digests = []
        for damages in False, True:
            options = ["--deterministic", "--micro-batch", "8", "--min-workers", "1"]
            options += ["--checkpoint-every", "5"]
            program = [HERE / "strict.py", "dropout", 0.05]
            with RunningJob(program, workers=1, batch=40, epochs=1, options=options) as job:
                if damages:
                    job.wait_for("a checkpoint", has_checkpoint)
                    for file in job.directory.glob("checkpoints/*/*.safetensors"):
                        damaged = bytearray(file.read_bytes())
                        damaged[-1] ^= 1
                        file.write_bytes(damaged)
                    os.kill(job.status()["workers"][0]["pid"], signal.SIGKILL)
                self.assertEqual(job.wait(), 0, job.text())
                summary, log = job.summary(), (job.path / "log").read_text()
            digests.append(summary["digest"])
        self.assertRegex(log, "damaged")
        self.assertEqual(digests[0], digests[1], log)

    def test_the_example_is_trained(self):
        program = [HERE.parent / "examples" / "ctr.py"]
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        options = ["--training-data", "clicks:0..12000", "--validation-data", "clicks:9000..10000",
                   "--export", folder.name + "/m.safetensors"]
        with RunningJob(program, workers=2, batch=200, epochs=1, options=options) as job:
            self.assertEqual(job.wait(), 0, job.text())
            summary = job.summary()
        touches = {"expected": 624_000, "counted": 624_000, "missing": 0, "repeated": 0}
        self.assertEqual(summary["row_touches"], touches)
        # The loss of the best constant is 0.627.
        loss = summary["evaluations"]["all"][-1]["metrics"]["loss"]
        self.assertLess(loss, 0.61)
        command = [ELASTICDL, "evaluate", "--local", "--job-dir", "job", "--data"]
        command += ["clicks:9000..10000", "--model", "m.safetensors", "--", sys.executable]
        command = [str(word) for word in command + program]
        ended = subprocess.run(command, cwd=folder.name, capture_output=True, text=True,
                               timeout=240, check=False)
        self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
        evaluated = json.loads(pathlib.Path(folder.name, "job", "summary.json").read_text())
        self.assertAlmostEqual(evaluated["metrics"]["loss"], loss, 5)


if __name__ == "__main__":
    unittest.main()
