"""Data sets of shards that are read from their beginning to their end."""

import bisect
import collections
import itertools

import torch


class Shards(torch.utils.data.Dataset):
    """A map-style data set of shards, such as archives or files of lines.

    ::

        ds = Shards([1000] * 64, lambda shard: read_lines(f"part-{shard}"))

    The records of shard 0 come first, then those of shard 1. A record is read with its whole shard,
    of which the last few are kept, in each process that reads: with ``--shuffle none`` or
    ``block``, the records of a step are near each other.
    """

    def __init__(self, records, read, *, kept=4):
        """``records``: number of records of each shard. ``read(shard)`` returns an iterable of the
        records of a shard, by its number, in an order that is always the same. ``kept``: number of
        shards that are kept in memory."""
        self._ends = list(itertools.accumulate(records))
        if not self._ends or min(records) < 1:
            raise ValueError("records has the number of records of each shard, each at least 1")
        if not callable(read):
            raise TypeError(f"read is {read!r}; it must be a function of the number of a shard")
        if kept < 1:
            raise ValueError(f"kept is {kept}; it must be at least 1")
        self._read = read
        self._kept_max = kept
        # By shard, the one that was used last at the end.
        self._kept = collections.OrderedDict()

    def __len__(self):
        return self._ends[-1]

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = bisect.bisect_right(self._ends, index)
        start = self._ends[shard - 1] if shard else 0
        return self._of(shard, self._ends[shard] - start)[index - start]

    def __getstate__(self):
        # For processes of a loader.
        return {**vars(self), "_kept": collections.OrderedDict()}

    def _of(self, shard, count):
        records = self._kept.pop(shard, None)
        if records is None:
            records = list(self._read(shard))
            if len(records) != count:
                raise ValueError(
                    f"shard {shard} has {len(records)} records, and {count} were declared; a job "
                    "counts each record once, so their number must be right"
                )
        self._kept[shard] = records
        if len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)
        return records
