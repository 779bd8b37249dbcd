"""What the integrations have in common."""

import os

import torch
from torch.utils.data import IterableDataset, RandomSampler

from .. import _elasticdl
from ..torch._advice import STREAM
from ..torch._divided import with_batches

# What works in place of the trainers' own ways.
ELASTICDL_TRAIN = (
    "start the program by elasticdl train, which starts the workers and sums their gradients"
)
RESUMES = "the job saves its state and resumes (elasticdl train --resume, --resume-from)"
BF16 = "bf16 computes in 16 bits"
COUNTS = "each record counts in a job"
STOPPED = (
    "the trainer stopped on this worker, and the job goes on. End it with --max-steps, or with "
    "job.evaluator(), --validation-data, --best-metric and --early-stopping"
)


def refuse(*settings):
    """Raises for the first of ``(whether it is set, what it is, what works)`` that is set."""
    for is_set, what, instead in settings:
        if is_set:
            raise ValueError(f"{what} can't be used in a job of elasticdl: {instead}")


def refused(what, instead):
    """A method that is refused."""

    def method(self, *arguments, **options):
        del self, arguments, options
        refuse((True, what, instead))

    return method


def use_device():
    """Lets accelerate, and what uses it, take the GPU of this worker."""
    if torch.cuda.is_available():
        device = f"cuda:{_elasticdl.gpu_ordinal()}"
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", device)


def training_loader(job, loader, batches, *, batch=None, **order):
    """The loader of a trainer, with the micro-batches of this worker.

    ``batch``: records of a micro-batch, if not ``loader.batch_size``. ``batches``: micro-batches of
    a step, without a master, and ``order``: ``epochs`` and other arguments of ``job.sampler()``.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(STREAM)
    batch = batch or loader.batch_size
    refuse(
        (batch is None, "a loader without batch_size", "give it a batch_size, and no sampler"),
        (loader.drop_last, "drop_last", COUNTS),
    )
    if job._worker.core is None:
        shuffle = isinstance(loader.sampler, RandomSampler)
        order = {"shuffle": shuffle, **order, "global_batch": batch * batches}
    else:
        order = {}
    sampler = job.sampler(len(loader.dataset), micro_batch=batch, **order)
    if job.steps is None:
        raise ValueError("a trainer counts steps: start the job with --global-batch-size")
    return with_batches(loader, sampler, persistent_workers=loader.persistent_workers)
