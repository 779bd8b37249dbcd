"""Random numbers that belong to records, not to workers."""

import torch

from .. import _elasticdl
from .._process import process


class Dropout(torch.nn.Dropout):
    """As ``torch.nn.Dropout``, with random numbers that belong to the records.

    What is dropped depends on the job's seed, the epoch, the record and the place of the module in
    the net alone, so it is the same for any number of workers and any size of micro-batches, and
    the same again if a record is computed twice. The first dimension of the input must be the
    records of the micro-batch. A module that is called more than once for a micro-batch drops the
    same elements each time.
    """

    _elasticdl_stream = 0

    def forward(self, input):
        """Drops elements, in training mode."""
        if not self.training or self.p == 0:
            return input
        job = process.job
        if job is None:
            raise RuntimeError("elasticdl.torch.Dropout needs a job; call elasticdl.torch.join()")
        records = job.micro_batch
        if input.dim() == 0 or input.shape[0] != len(records):
            raise ValueError(
                f"the input of elasticdl.torch.Dropout has the shape {list(input.shape)}; its "
                f"first dimension must be the {len(records)} records of the micro-batch"
            )
        seeds = _elasticdl.seeds_of_records(
            job.seed, records[0].epoch, records, self._elasticdl_stream
        )
        numbers = uniform(seeds, input[0].numel()).to(input.device).view(input.shape)
        kept = input * (numbers >= self.p) * (1 / (1 - self.p) if self.p < 1 else 0.0)
        return input.copy_(kept) if self.inplace else kept


def number_modules(net):
    """Gives each module with random numbers of its own a stream."""
    streams = (module for module in net.modules() if isinstance(module, Dropout))
    for stream, module in enumerate(streams):
        module._elasticdl_stream = stream


def uniform(seeds, count):
    """A row of ``count`` numbers in [0, 1) for each seed: SplitMix64, by position."""
    state = torch.tensor(seeds, dtype=torch.int64)[:, None]
    state = state + torch.arange(1, count + 1, dtype=torch.int64)[None] * _GOLDEN
    state = (state ^ _shifted(state, 30)) * _MIX_1
    state = (state ^ _shifted(state, 27)) * _MIX_2
    state = state ^ _shifted(state, 31)
    return _shifted(state, 40).to(torch.float32) * 2.0**-24


def _shifted(values, bits):
    """Shifts right, as if the values had no sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value):
    return value - (1 << 64) if value >= 1 << 63 else value


# Steele, Lea & Flood, Fast splittable pseudorandom number generators (2014).
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
