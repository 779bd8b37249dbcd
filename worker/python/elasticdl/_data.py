"""Exactly-once data for programs that reduce gradients by other means."""

import collections
import os

from . import _elasticdl
from ._checks import check_count
from ._job import Job
from ._passes import Passes
from ._process import process
from ._sampler import Record, Sampler


def sampler(
    length,
    *,
    micro_batch=None,
    global_batch=None,
    epochs=None,
    max_steps=None,
    seed=None,
    shuffle=None,
    rank=None,
    world_size=None,
):
    """Returns a sampler of a data set of ``length`` records, for a program that does not train
    through elasticdl: with torchrun, torchft, or a collective of its own.

    The records of each step are those of a job with the same ``global_batch``, ``seed`` and
    ``shuffle``, whatever the number of workers; see ``Job.sampler()``. ``commit()`` says that the
    gradient of a micro-batch was used, and ``state_dict()`` is to be saved together with the model.
    A loop over the sampler is one epoch; several are in ``for epoch in sampler.epochs()``.

    In a job of ``elasticdl train``, the workers agree through the master and their ring which
    records are committed. Those of a worker that is lost are yielded by the others, in the same
    step, and workers may join and leave at any time. No gradient passes through elasticdl.

    Otherwise each rank computes its share from ``rank`` and ``world_size``, by default those in the
    environment that torchrun sets. All ranks take the same steps. A rank that restarts, in a group
    of any size, continues after the committed records of the state that it loads: with a model that
    was saved at the same time, every record counts exactly once.
    """
    limits = {"global_batch": global_batch, "epochs": epochs, "max_steps": max_steps}
    order = {"seed": seed, "shuffle": shuffle}
    if process.job is not None:
        raise RuntimeError("this process has joined its job already; its data is job.sampler()")
    core = _elasticdl.Core.join()
    if core is not None:
        if core.options.audits:
            raise ValueError(_NO_AUDIT)
        if rank is not None or world_size is not None:
            raise ValueError("rank and world_size are the job's; leave them out")
        job = Job(core)
        process.enter(job)
        # What the group carries beside the records: one number, which stays zero.
        job.model(1, update=lambda step, records: None)
        job._worker.loop, job._worker.source = _LOOP, _SOURCE
        return job.sampler(length, micro_batch=micro_batch or 32, **limits, **order)
    rank = _of_environment("RANK", rank, 0)
    world_size = _of_environment("WORLD_SIZE", world_size, 1)
    if micro_batch is not None:
        check_count("micro_batch", micro_batch, 1)
    for name, value, least in (
        ("length", length, 1),
        ("global_batch", 32 * world_size if global_batch is None else global_batch, 1),
        ("epochs", 1 if epochs is None else epochs, 1),
        ("seed", 0 if seed is None else seed, 0),
        ("rank", rank, 0),
        ("world_size", world_size, 1),
    ):
        check_count(name, value, least)
    if max_steps is not None:
        check_count("max_steps", max_steps, 1)
    if shuffle not in (None, False, True):
        raise TypeError(f"shuffle is {shuffle!r}; it must be a bool")
    seed = None if shuffle is False else seed or 0
    batch = global_batch or 32 * world_size
    share = _elasticdl.Share(
        records=length,
        epochs=epochs or 1,
        global_batch=batch,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )
    ends = epochs or 1, max_steps
    group = _FixedGroup(share, (rank, world_size), length, micro_batch, seed, ends)
    group.steps_per_epoch = -(-length // batch)
    return Sampler(group, length, micro_batch, seed)


# For messages.
_LOOP, _SOURCE = "sampler.epochs()", "elasticdl.sampler()"


class _FixedGroup(Passes):
    """The micro-batches of one rank of a group of a fixed size."""

    loop, source = _LOOP, _SOURCE
    generation = 0
    steps_per_epoch = None

    def __init__(self, share, place, length, micro_batch, seed, ends):
        self.rank, self.world_size = place
        self._share = share
        self._length = length
        self._micro_batch = micro_batch
        self._seed = seed
        self._epochs, self._max_steps = ends
        self.step = 0
        self._begin(0)

    def _begin(self, absorbed):
        self.records = absorbed
        # Where the next step to be drawn begins, what is left of the one before, and for each drawn
        # micro-batch, where its step ends if it is the last one of its step.
        self._at = absorbed
        self._steps_drawn = 0
        self._rest = collections.deque()
        self._ends = collections.deque()

    def place(self):
        return self.records // self._length, self.step

    def begin_epoch(self):
        self._begin(self.records)
        return None if self.ended else self.place()[0]

    @property
    def ended(self):
        is_last = self._max_steps is not None and self.step >= self._max_steps
        return is_last or self.place()[0] >= self._epochs

    def begin_pass(self):
        # A rank that restarts when all is trained has an empty loop.
        if self.step or self.epoch is not None:
            super().begin_pass()

    def draw(self):
        self.check_loop(self._epochs)
        if not self._rest:
            self._draw_step()
        batch, end = self._rest.popleft()
        self._ends.append(end)
        return batch

    def _draw_step(self):
        limit = self._max_steps
        step = None
        if limit is None or self.step + self._steps_drawn < limit:
            step = self._share.step(self._at)
        if step is None or step.epoch != (self.epoch or 0):
            raise StopIteration
        epoch, indices, end = step.epoch, step.records, step.next
        if end - self._at < self.world_size:
            raise ValueError(
                f"the step after record {self._at % self._length} of epoch {epoch} has "
                f"{end - self._at} records, too few for {self.world_size} ranks; choose a "
                "global_batch for which the last step of an epoch has at least as many records "
                "as there are ranks"
            )
        size = self._micro_batch or len(indices)
        records = [Record(index, epoch, self._seed or 0) for index in indices]
        for at in range(0, len(records), size):
            is_last = at + size >= len(records)
            self._rest.append((records[at : at + size], end if is_last else None))
        self._at = end
        self._steps_drawn += 1

    def commit(self):
        if not self._ends:
            raise RuntimeError("there is no micro-batch to commit: each needs its own draw")
        end = self._ends.popleft()
        if end is None:
            return False
        self.records = end
        self.step += 1
        self._steps_drawn -= 1
        return True

    def load(self, records):
        if self._ends or self._rest or self.step:
            raise RuntimeError("load_state_dict() must be called before the first draw")
        self._begin(records)


def _of_environment(name, given, default):
    if given is not None:
        return given
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r} in the environment; it must be a number") from None


_NO_AUDIT = (
    "--audit can't be used for this job: no gradient of the program passes through elasticdl, so "
    "none can be compared; start it without"
)
