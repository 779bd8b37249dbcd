"""Evaluation loops over data that the workers divide, and whose values each of them gets.

The batches of a loader are computed in rounds: in each of them, every worker computes one batch,
and gets the values of all::

    batch     0  1  2 | 3  4  5 | 6  7        with three workers
    worker 1  0       | 3       | 6
    worker 2     1    |    4    |    7
    worker 3        2 |       5 |    7        once more, and not used

A worker that has lost its ring, because another worker was lost or has left its loop, computes all
batches whose values it lacks. So each worker gets the values of each batch once, in the order of
the loader.
"""

import io

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class Divided:
    """The batches of a loader: those of this worker, in a loop."""

    def __init__(self, loops, loader):
        _check(loader)
        self._loops = loops
        self._loader = loader
        self.dataset = loader.dataset

    def __len__(self):
        """Number of batches of all workers."""
        return len(self._loader)

    def __iter__(self):
        batches = list(self._loader.batch_sampler)
        loop = self._loops.begin(len(batches))
        try:
            indices = loop.share()
            while indices:
                data = with_batches(self._loader, [batches[index] for index in indices])
                for loop.current, batch in zip(indices, data, strict=True):
                    yield batch
                    if loop.current is not None:
                        raise RuntimeError(
                            "a batch of job.divided() has had no job.gather_for_metrics(); call "
                            "it once for each batch, on each worker"
                        )
                indices = loop.missing()
        finally:
            self._loops.end(loop)


class Loops:
    """The loop over divided data that runs, if any."""

    def __init__(self, meeting):
        self._meeting = meeting
        self._running = None

    def begin(self, count):
        """A loop over so many batches begins."""
        if self._running is not None:
            raise RuntimeError("a loop over job.divided() is within another one, or was left early")
        self._running = _Loop(count, self._meeting.connect())
        return self._running

    def end(self, loop):
        """The loop is over, or was left."""
        self._running = None
        loop.end()

    def gather(self, values):
        """See ``Job.gather_for_metrics()``."""
        if self._running is None or self._running.current is None:
            raise RuntimeError(
                "job.gather_for_metrics() is called once for each batch of a loop over "
                "job.divided(loader), and this is another place"
            )
        return self._running.gather(values)


class _Loop:
    def __init__(self, count, ring):
        self._count = count
        self._ring = ring
        # Values by batch, until they are given to the program, and the first that was not.
        self._values = {}
        self._next = 0
        # The batch that the program computes.
        self.current = None

    def share(self):
        """The batches of this worker."""
        if self._ring is None or not self._count:
            return list(range(self._count))
        rank, size = self._ring.rank, self._ring.size
        last = self._count - 1
        return [min(first + rank, last) for first in range(0, self._count, size)]

    def missing(self):
        """The batches whose values this worker lacks."""
        return [at for at in range(self._next, self._count) if at not in self._values]

    def gather(self, values):
        at, self.current = self.current, None
        found = [(at, _map(_as_batch, values))]
        if self._ring is not None:
            found = self._exchanged(at, found[0][1]) or found
        for each, of in found:
            if each >= self._next:
                self._values.setdefault(each, of)
        ready = []
        while self._next in self._values:
            ready.append(self._values.pop(self._next))
            self._next += 1
        return _joined(values, ready)

    def end(self):
        if self._ring is not None and self.missing():
            # The others must not wait for this worker.
            self._ring.leave()

    def _exchanged(self, at, values):
        """Batches and their values, of all ranks; None if the ring has ended."""
        file = io.BytesIO()
        torch.save((self._count, at, _map(torch.Tensor.cpu, values)), file)
        parts = self._ring.gather(file.getvalue())
        if parts is None:
            self._ring = None
            return None
        loaded = [torch.load(io.BytesIO(part), weights_only=True) for part in parts]
        counts = {count for count, _, _ in loaded}
        if len(counts) > 1:
            raise RuntimeError(
                f"the workers' loaders have {sorted(counts)} batches; a loader of job.divided() "
                "must have the same on all of them"
            )
        return [(each, of) for _, each, of in loaded]


def with_batches(loader, batches, **settings):
    """A loader of the same data with these lists of indices, and other ``settings``."""
    like = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
    }
    return DataLoader(loader.dataset, batch_sampler=batches, **{**like, **settings})


def _check(loader):
    if not isinstance(loader, DataLoader):
        kind = type(loader).__name__
        raise TypeError(f"job.divided() takes a torch.utils.data.DataLoader, not {kind}")
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise TypeError(
            "job.divided() takes a loader of batches of a map-style data set: its workers divide "
            "batches by their indices, which an IterableDataset, or batch_size=None, does not have"
        )
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    if any(isinstance(each, _SHUFFLES) for each in samplers):
        raise ValueError(
            "job.divided() takes a loader without shuffle: each worker would have another order"
        )


def _as_batch(tensor):
    tensor = tensor.detach()
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _map(function, *trees):
    """Applies a function to the tensors of trees of the same form."""
    first = trees[0]
    if torch.is_tensor(first):
        return function(*trees)
    if isinstance(first, dict):
        return {name: _map(function, *(tree[name] for tree in trees)) for name in first}
    if isinstance(first, (list, tuple)):
        parts = [_map(function, *each) for each in zip(*trees, strict=True)]
        return parts if isinstance(first, list) else tuple(parts)
    raise TypeError(
        f"job.gather_for_metrics() got a {type(first).__name__}; it takes tensors, and lists, "
        "tuples and dicts of them"
    )


def _joined(like, ready):
    """The values of batches, one after the other, on the device of those of this worker."""
    if not ready:
        return _map(lambda own: _as_batch(own)[:0], like)

    def join(own, *parts):
        return torch.cat([part.to(own.device) for part in parts])

    return _map(join, like, *ready)


_SHUFFLES = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
