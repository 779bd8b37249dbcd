"""Tests of data sets of shards, and of what is said about other data."""

import importlib.util
import textwrap
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

from test_loops import SETUP
from snippets import run


class Alone(unittest.TestCase):
    """A group of one."""

    def test_each_record_of_shards_counts_once_and_a_shard_is_read_once_in_order(self):
        ended = run(
            SETUP
            + textwrap.dedent(
                """
                sizes, reads = [5, 1, 12, 6], []
                ends = [5, 6, 18, 24]

                def read(shard):
                    reads.append(shard)
                    return iter(x[ends[shard] - sizes[shard] : ends[shard]])

                def train(ds, loaders, **options):
                    job, net, _, opt, data = setup(**options)
                    data = DataLoader(ds, batch_sampler=data.batch_sampler, num_workers=loaders)
                    found = []
                    for _ in job.epochs():
                        for batch in data:
                            found.append((batch, job.micro_batch))
                            backward(net, batch)
                            opt.step()
                    assert job.records == 48
                    for batch, indices in found:
                        assert torch.equal(batch, x[[int(index) for index in indices]])

                train(et.Shards(sizes, read, kept=1), 0, shuffle=False)
                assert reads == [0, 1, 2, 3] * 2, reads
                reads.clear()
                train(et.Shards(sizes, read), 0)
                assert sorted(reads) == [0, 1, 2, 3], reads
                train(et.Shards(sizes, read, kept=2), 2)
                for make, expected in (
                    (lambda: et.Shards([], read), "each at least 1"),
                    (lambda: et.Shards([3, 0], read), "each at least 1"),
                    (lambda: et.Shards([3], "path"), "must be a function"),
                    (lambda: et.Shards([3], read, kept=0), "kept is 0"),
                    (lambda: et.Shards([4], read)[0], "shard 0 has 5 records, and 4 were"),
                    (lambda: et.Shards(sizes, read)[24], "record 24 of 24"),
                ):
                    try:
                        make()
                    except (IndexError, TypeError, ValueError) as error:
                        assert expected in str(error), error
                        continue
                    raise AssertionError(expected)
                print("passed")
                """
            )
        )
        self.assertEqual(ended.stdout, "passed\n", ended.stderr)

    def test_errors_of_pytorch_are_followed_by_what_works_in_a_job(self):
        for program, expected in (
            (
                """
                class Stream(torch.utils.data.IterableDataset):
                    def __iter__(self):
                        return iter(x)
                DataLoader(Stream(), batch_sampler=setup()[-1].batch_sampler)
                """,
                "elasticdl.torch.Shards(records, read) is a data set with indices",
            ),
            (
                """
                job, net, _, opt, data = setup(global_batch=23)
                norm = torch.nn.BatchNorm1d(3)
                for _ in job.epochs():
                    for batch in data:
                        backward(net, norm(batch))
                        opt.step()
                """,
                "elasticdl: BatchNorm got a micro-batch of 1 record. A step has 23 records "
                "(the last one of an epoch 1,",
            ),
        ):
            ended = run(SETUP + textwrap.dedent(program))
            self.assertEqual(ended.returncode, 1)
            self.assertIn(expected, ended.stderr)


if __name__ == "__main__":
    unittest.main()
