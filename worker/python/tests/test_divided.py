"""Tests of evaluation loops that the workers divide."""

import importlib.util
import textwrap
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

from jobs import HERE, RunningJob, needs_elasticdl
from test_loops import SETUP
from snippets import run

# Loaders that can't be divided, and what the error says.
LOADERS = (
    ("x", "takes a torch.utils.data.DataLoader, not Tensor"),
    ("DataLoader(x, batch_size=4, shuffle=True)", "takes a loader without shuffle"),
    ("DataLoader(x, batch_size=None)", "batches of a map-style data set"),
    ("DataLoader(Stream(), batch_size=4)", "batches of a map-style data set"),
)


class Alone(unittest.TestCase):
    """A group of one."""

    def test_a_worker_alone_gets_the_values_of_its_batches_once_in_their_order(self):
        ended = run(
            SETUP
            + textwrap.dedent(
                f"""
                class Stream(torch.utils.data.IterableDataset):
                    def __iter__(self):
                        return iter(x)

                def refused(act, expected):
                    try:
                        act()
                    except (RuntimeError, TypeError, ValueError) as error:
                        assert expected in str(error), error
                        return
                    raise AssertionError(expected)

                job, net, _, opt, data = setup()
                for loader, expected in {LOADERS!r}:
                    refused(lambda: job.divided(eval(loader)), expected)
                tests = [job.divided(DataLoader(x, 5, num_workers=n)) for n in (0, 2)]
                for _ in job.epochs():
                    for batch in data:
                        backward(net, batch)
                        opt.step()
                    for test in tests:
                        parts = [job.gather_for_metrics([batch, batch[0, 0]]) for batch in test]
                        values, firsts = map(torch.cat, zip(*parts))
                        assert torch.equal(values, x) and torch.equal(firsts, x[::5, 0])
                        assert len(test) == len(parts) == 5 and len(test.dataset) == 24
                refused(lambda: job.gather_for_metrics(x), "and this is another place")
                refused(lambda: job.divided(DataLoader(x, 5)), "before the first micro-batch")
                refused(lambda: [0 for _ in test], "has had no job.gather_for_metrics()")
                for batch in test:
                    refused(lambda: job.gather_for_metrics("text"), "got a str; it takes tensors")
                    refused(lambda: job.gather_for_metrics(x), "and this is another place")
                    refused(lambda: next(iter(test)), "is within another one")
                    break
                assert len([job.gather_for_metrics(batch) for batch in test]) == 5
                print("passed")
                """
            )
        )
        self.assertEqual(ended.stdout, "passed\n", ended.stderr)


@needs_elasticdl
class Jobs(unittest.TestCase):
    """Jobs with a master."""

    def lines(self, killed):
        """Epochs, numbers of batches, and whether the values are right."""
        program = [HERE / "divided.py", "{job}/lines", killed]
        with RunningJob(program, epochs=3, options=["--min-workers", "3"]) as job:
            self.assertEqual(job.wait(), 0, job.text())
            lines = [line.split() for line in (job.path / "lines").read_text().splitlines()]
            logs = [log.read_text()[-2000:] for log in job.directory.glob("logs/*.log")]
        return lines, f"{lines}\n" + "\n".join(logs)

    def test_each_worker_computes_its_part_and_gets_the_values_of_all(self):
        lines, context = self.lines(killed=-1)
        expected = [[str(epoch), "5", "True"] for epoch in range(3) for _ in range(6)]
        self.assertEqual(sorted(lines), expected, context)

    def test_workers_that_lose_another_one_in_a_test_compute_what_is_missing(self):
        lines, context = self.lines(killed=1)
        self.assertEqual({is_right for _, _, is_right in lines}, {"True"}, context)
        # Two rounds of three batches were complete, and 13 are all.
        counts = [int(count) for epoch, count, _ in lines if epoch == "1"]
        self.assertEqual(len(counts), 2, context)
        self.assertTrue(all(5 < count < 13 for count in counts), context)
        self.assertGreaterEqual(len(lines), 7, context)


if __name__ == "__main__":
    unittest.main()
