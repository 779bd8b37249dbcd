"""Tests of the order of records, their seeds, and of data without training."""

import copy
import json
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import unittest

try:
    import elasticdl
except ImportError as error:
    raise unittest.SkipTest(f"{error}: install the package, with `pip install worker/python`")

from jobs import HERE, RunningJob, needs_elasticdl


CAPTURED = {"capture_output": True, "text": True, "check": False}


def environment():
    return {k: v for k, v in os.environ.items() if not k.startswith("ELASTICDL_")}


def samplers(world_size, **options):
    given = {"length": 103, "global_batch": 10, "epochs": 2, "seed": 3, **options}
    return [
        elasticdl.sampler(**given, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def take_step(ranks):
    """Draws and commits one step of all ranks. Returns its records; None at the end."""
    records = []
    for rank in ranks:
        committed = False
        while not committed:
            batch = next(rank, None)
            if batch is None:
                return None
            records += [(record.epoch, int(record)) for record in batch]
            committed = rank.commit()
    return records


def take_all(ranks, steps=1 << 30):
    taken = []
    epochs = [rank.epochs() for rank in ranks]
    while None not in [next(each, None) for each in epochs]:
        while (records := take_step(ranks)) is not None:
            taken.append(sorted(records))
            if len(taken) == steps:
                return taken
    return taken


class FixedGroups(unittest.TestCase):
    """Groups of a fixed size, without a master."""

    def test_every_size_has_the_same_steps(self):
        alone = take_all(samplers(1))
        self.assertEqual(len(alone), 22)
        every = [(epoch, index) for epoch in range(2) for index in range(103)]
        self.assertEqual(sorted(record for step in alone for record in step), every)
        for world_size, micro_batch in (2, None), (3, 1), (3, 2):
            ranks = samplers(world_size, micro_batch=micro_batch)
            self.assertEqual(take_all(ranks), alone, f"{world_size} ranks")
            self.assertEqual({rank.records for rank in ranks}, {206})

    def test_a_state_loads_at_any_size(self):
        for seed in range(20):
            rng = random.Random(seed)
            state, alone = None, take_all(samplers(1))
            steps = []
            while True:
                ranks = samplers(rng.choice([1, 2, 3]), micro_batch=rng.choice([None, 2]))
                for rank in ranks:
                    if state is not None:
                        rank.load_state_dict(copy.deepcopy(state))
                steps += take_all(ranks, rng.randrange(1, 9))
                states = {json.dumps(rank.state_dict()) for rank in ranks}
                self.assertEqual(len(states), 1, f"seed {seed}")
                # What was drawn and not committed is drawn again by the next group.
                for rank in ranks:
                    for _ in range(rng.randrange(3)):
                        next(rank, None)
                self.assertEqual({json.dumps(rank.state_dict()) for rank in ranks}, states)
                state = ranks[0].state_dict()
                if state["records"] == 206:
                    break
            self.assertEqual(steps, alone, f"seed {seed}")

    def test_prefetched_micro_batches_are_not_committed(self):
        (sampler,) = samplers(1, micro_batch=4, epochs=1)
        drawn = [next(sampler) for _ in range(9)]
        self.assertEqual([len(batch) for batch in drawn], [4, 4, 2] * 3)
        committed = [sampler.commit() for _ in range(4)]
        self.assertEqual(committed, [False, False, True, False])
        self.assertEqual((sampler.records, sampler.step), (10, 1))

    def test_max_steps(self):
        self.assertEqual(len(take_all(samplers(2, max_steps=3))), 3)

    def test_a_loop_over_the_sampler_is_one_epoch(self):
        def loop(sampler, most=1 << 30):
            taken = []
            for records in sampler:
                taken += records
                sampler.commit()
                if len(taken) >= most:
                    break
            return {record.epoch for record in taken}, sorted(taken)

        state = samplers(1)[0].state_dict()
        for records in 0, 50, 103:
            (sampler,) = samplers(1)
            sampler.load_state_dict({**state, "records": records})
            found = [(epoch, *loop(sampler)) for epoch in sampler.epochs()]
            self.assertEqual([epoch for epoch, *_ in found], list(range(records // 103, 2)))
            for epoch, epochs, taken in found:
                self.assertEqual(epochs, {epoch})
                rest = 103 - (records if epoch == 0 else 0)
                self.assertEqual(len(set(taken)), rest, f"epoch {epoch} after {records} records")
            self.assertEqual(sampler.records, 206)
        (sampler,) = samplers(1, max_steps=12)
        self.assertEqual([len(loop(sampler)[1]) for _ in sampler.epochs()], [103, 10])
        for act, expected in (
            (loop, "there are 2 epochs, and a loop over the data is one of them"),
            (lambda s: [loop(s) + loop(s) for _ in s.epochs()], "epoch 0 is complete, and this"),
            (lambda s: [loop(s, 10) for _ in s.epochs()], "left in epoch 0, after step 1, before"),
        ):
            with self.assertRaisesRegex(RuntimeError, expected) as refused:
                act(*samplers(1))
            self.assertRegex(str(refused.exception), "sampler.epochs\\(\\)|elasticdl.sampler")

    def test_torchrun_sets_rank_and_world_size(self):
        program = (
            "import elasticdl\n"
            "s = elasticdl.sampler(12, global_batch=6, shuffle=False)\n"
            "print([list(map(int, b)) for b in s], s.rank, s.world_size)\n"
        )
        variables = {**environment(), "RANK": "1", "WORLD_SIZE": "3"}
        ended = subprocess.run([sys.executable, "-c", program], **CAPTURED, env=variables)
        self.assertEqual(ended.stdout, "[[2, 3], [8, 9]] 1 3\n", ended.stderr)

    def test_misuse_is_refused_with_what_is_right(self):
        state = samplers(1)[0].state_dict()
        for act, expected in (
            (lambda: samplers(1, length=0), "length is 0; it must be at least 1"),
            (lambda: samplers(1, micro_batch=True), "micro_batch is True; it must be an int"),
            (lambda: samplers(1, shuffle=3), "shuffle is 3; it must be a bool"),
            (lambda: samplers(1)[0].commit(), "there is no micro-batch to commit"),
            (lambda: next(samplers(12, epochs=1)[0]), "has 10 records, too few for 12 ranks"),
            (
                lambda: elasticdl.sampler(9, rank=2, world_size=2),
                "rank is 2; it must be below world_size",
            ),
            (lambda: samplers(1)[0].load_state_dict({}), "is not one that state_dict()"),
            (
                lambda: samplers(1)[0].load_state_dict({**state, "length": 9}),
                "with length 9, and this one has 103",
            ),
            (
                lambda: samplers(1)[0].load_state_dict({**state, "seed": 9, "records": 1}),
                "with seed 9, and this one has 3",
            ),
            (
                lambda: samplers(1)[0].load_state_dict({**state, "records": -1}),
                "the number of records of the state is -1",
            ),
        ):
            with self.assertRaises((RuntimeError, TypeError, ValueError)) as refused:
                act()
            self.assertIn(expected, str(refused.exception))

    def test_a_record_has_the_same_seed_in_every_process(self):
        record = next(samplers(1, epochs=1)[0])[0]
        again = pickle.loads(pickle.dumps(record))
        self.assertEqual((record, record.epoch), (again, again.epoch))
        self.assertEqual(record.seed_for(), again.seed_for())
        self.assertNotEqual(record.seed_for(), record.seed_for(stream=1))


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Jobs with a master."""

    RECORDS = 1000

    def steps(self, workers, kills):
        program = [HERE / "steps.py", self.RECORDS, 300, "{job}/steps"]
        options = ["--seed", "5"]
        with RunningJob(program, workers=workers, options=options) as job:
            if kills:
                job.wait_for_steps()
                job.kill_any(random.Random(kills))
            self.assertEqual(job.wait(), 0, job.text())
            return self.read(job.path / "steps")

    @staticmethod
    def read(path):
        steps = {}
        for line in path.read_text().splitlines():
            step, *records = map(int, line.split())
            steps.setdefault(step, set()).update(records)
        return steps

    def test_a_step_has_the_same_records_for_any_number_of_workers(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "alone"
            program = [sys.executable, HERE / "steps.py", str(self.RECORDS), "0", path, "alone"]
            subprocess.run(program, check=True, env=environment())
            alone = self.read(path)
        self.assertEqual(sorted(alone), list(range(42)))
        self.assertEqual(set().union(*[alone[step] for step in range(21)]), set(range(1000)))
        self.assertTrue(all(len(records) <= 48 for records in alone.values()))
        self.assertNotEqual(alone[0], alone[21], "each epoch has an order of its own")
        for workers, kills in (1, 0), (2, 0), (3, 0), (3, 1):
            self.assertEqual(self.steps(workers, kills), alone, f"{workers} workers, {kills} kills")

    def data(self, *more, workers=3, options=()):
        program = [HERE / "data.py", self.RECORDS, 2000, "{job}", *more]
        return RunningJob(program, workers=workers, options=["--seed", "9", *options])

    def covered(self, job):
        records = set()
        for line in (job.path / "lines").read_text().splitlines():
            base, *indices = map(int, line.split())
            records.update(base + index for index in indices)
        return records

    def check(self, job, counted):
        self.assertEqual(job.wait(), 0, job.text())
        records = job.summary()["records"]
        found = [records[key] for key in ("counted", "repeated")]
        self.assertEqual(found, [counted, 0], job.text())

    def test_records_of_a_killed_worker_are_committed_by_others(self):
        with self.data() as job:
            kills = job.survive(1, (0.5, 2.0), (signal.SIGKILL,))
            self.check(job, 2 * self.RECORDS)
            self.assertGreater(kills, 0)
            self.assertEqual(self.covered(job), set(range(2 * self.RECORDS)))

    def test_a_state_loads_in_a_job_of_another_size(self):
        with self.data(options=["--max-steps", "13"]) as first:
            self.check(first, 13 * 48)
            before = self.covered(first)
            self.assertEqual(len(before), 13 * 48)
            with self.data(first.path / f"state-{13 * 48}", workers=2) as second:
                self.check(second, 2 * self.RECORDS)
                after = self.covered(second)
        self.assertEqual(before | after, set(range(2 * self.RECORDS)))
        self.assertEqual(before & after, set())


if __name__ == "__main__":
    unittest.main()
