"""Exactly-once data for programs that reduce gradients by other means."""

import collections
import os

from . import _elasticdl, _job


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

    In a job of ``elasticdl train``, returns a :class:`GroupSampler`: its workers agree through the
    master and their ring which records are committed, and take over those of a lost worker.
    Otherwise returns a :class:`RankSampler`: each rank computes its share from ``rank`` and
    ``world_size``, by default those in the environment that torchrun sets.
    """
    limits = {"global_batch": global_batch, "epochs": epochs, "max_steps": max_steps}
    order = {"seed": seed, "shuffle": shuffle}
    if _job._process.job is not None:
        raise RuntimeError("this process has joined its job already; its data is job.sampler()")
    core = _elasticdl.Core.join()
    if core is not None:
        if rank is not None or world_size is not None:
            raise ValueError("rank and world_size are the job's; leave them out")
        return GroupSampler(core, length, micro_batch or 32, {**limits, **order})
    rank = _of_environment("RANK", rank, 0)
    world_size = _of_environment("WORLD_SIZE", world_size, 1)
    return RankSampler(
        length, micro_batch=micro_batch, rank=rank, world_size=world_size, **limits, **order
    )


class RankSampler:
    """Yields lists of :class:`Record`: the micro-batches of one rank of a group of a fixed size.

    All ranks take the same steps. A rank that restarts, in a group of any size, continues after the
    committed records of the state that it loads: with a model that was saved at the same time,
    every record counts exactly once.
    """

    def __init__(
        self,
        length,
        *,
        micro_batch=None,
        global_batch=None,
        epochs=None,
        max_steps=None,
        seed=None,
        shuffle=None,
        rank=0,
        world_size=1,
    ):
        micro_batch_given = {} if micro_batch is None else {"micro_batch": micro_batch}
        for name, value, least in (
            ("length", length, 1),
            ("global_batch", 32 * world_size if global_batch is None else global_batch, 1),
            ("epochs", 1 if epochs is None else epochs, 1),
            ("seed", 0 if seed is None else seed, 0),
            ("rank", rank, 0),
            ("world_size", world_size, 1),
            *((name, value, 1) for name, value in micro_batch_given.items()),
        ):
            _job._check_count(name, value, least)
        if max_steps is not None:
            _job._check_count("max_steps", max_steps, 1)
        if shuffle not in (None, False, True):
            raise TypeError(f"shuffle is {shuffle!r}; it must be a bool")
        self.length = length
        self.micro_batch = micro_batch
        self.global_batch = global_batch or 32 * world_size
        self.seed = None if shuffle is False else seed or 0
        self.rank = rank
        self.world_size = world_size
        self.epochs = epochs or 1
        self.max_steps = max_steps
        self.step = 0
        self._share = _elasticdl.Share(
            records=length,
            epochs=self.epochs,
            global_batch=self.global_batch,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        self._begin(0)

    def _begin(self, absorbed):
        self.records = absorbed
        # Where the next step to be drawn begins, what is left of the one before, and for each drawn
        # micro-batch, where its step ends if it is the last one of its step.
        self._at = absorbed
        self._steps_drawn = 0
        self._rest = collections.deque()
        self._ends = collections.deque()

    def __iter__(self):
        return self

    def __next__(self):
        if not self._rest:
            self._draw_step()
        batch, end = self._rest.popleft()
        self._ends.append(end)
        return batch

    def _draw_step(self):
        limit = self.max_steps
        step = None
        if limit is None or self.step + self._steps_drawn < limit:
            step = self._share.step(self._at)
        if step is None:
            raise StopIteration
        epoch, indices, end = step
        if end - self._at < self.world_size:
            raise ValueError(
                f"the step after record {self._at % self.length} of epoch {epoch} has "
                f"{end - self._at} records, too few for {self.world_size} ranks; choose a "
                "global_batch for which the last step of an epoch has at least as many records "
                "as there are ranks"
            )
        size = self.micro_batch or len(indices)
        records = [_job.Record(index, epoch, self.seed or 0) for index in indices]
        for at in range(0, len(records), size):
            is_last = at + size >= len(records)
            self._rest.append((records[at : at + size], end if is_last else None))
        self._at = end
        self._steps_drawn += 1

    def commit(self):
        """The gradient of the micro-batch drawn first was used. Returns whether its step is over.

        The other ranks are assumed to be as far: call it after the collective that sums gradients.
        """
        if not self._ends:
            raise RuntimeError("there is no micro-batch to commit: each needs its own draw")
        end = self._ends.popleft()
        if end is None:
            return False
        self.records = end
        self.step += 1
        self._steps_drawn -= 1
        return True

    def state_dict(self):
        """What is committed, the same on all ranks at a step's end."""
        return _state(self.length, self.seed, self.records)

    def load_state_dict(self, state):
        """Continues after the committed records of a state of a group of any size."""
        if self._ends or self._rest or self.step:
            raise RuntimeError("load_state_dict() must be called before the first draw")
        self._begin(_records_of(state, self.length, self.seed))


class GroupSampler:
    """Yields lists of :class:`Record`: the micro-batches of one worker of a job.

    The members of the job agree on what is committed. The records of a worker that is lost are
    yielded by the others, in the same step. Workers may join and leave at any time. No gradient
    passes through elasticdl.
    """

    def __init__(self, core, length, micro_batch, options):
        job = _job.Job(core)
        _job._process.enter(job)
        self._job = job
        # What the group carries beside the records: one number, which stays zero.
        job.model(1, update=lambda step, records: None)
        self._sampler = job.sampler(length, micro_batch=micro_batch, **options)
        self.length = length
        self.micro_batch = micro_batch
        self.seed = core.options.seed if core.options.shuffles else None

    @property
    def generation(self):
        """Number of the group's membership; 0 before the first."""
        return self._job.generation

    @property
    def rank(self):
        """Index of this worker in its group."""
        return self._job.rank

    @property
    def world_size(self):
        """Number of workers in the group; 0 before the first group."""
        return self._job.world_size

    @property
    def step(self):
        """Number of committed steps of this job."""
        return self._job.step

    @property
    def records(self):
        """Number of committed records, over all epochs."""
        return max(self._job.records, self._job._absorbed)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._sampler)

    def commit(self):
        """The gradient of the micro-batch drawn first was used. Returns whether its step is over.

        Waits until all workers have committed the records of the step, or until the group needs
        more records of this worker for it, because another one was lost.
        """
        return self._job.commit()

    def state_dict(self):
        """What is committed, the same on all workers at a step's end."""
        return _state(self.length, self.seed, self.records)

    def load_state_dict(self, state):
        """Continues after the committed records of a state, unless the group has begun already.

        To be called on every worker, before the first draw.
        """
        self._job._not_begun("load_state_dict()")
        self._job._absorbed = _records_of(state, self.length, self.seed)


def _state(length, seed, records):
    return {"format": 1, "length": length, "seed": seed, "records": records}


def _records_of(state, length, seed):
    if not isinstance(state, dict) or state.get("format") != 1:
        raise ValueError("the state is not one that state_dict() of a sampler has returned")
    _job._check_count("the number of records of the state", state.get("records"), 0)
    for name, value in ("length", length), ("seed", seed):
        # At the end of an epoch, any order may follow.
        if state.get(name) != value and (name == "length" or state["records"] % length):
            raise ValueError(
                f"the state is of a sampler with {name} {state.get(name)!r}, and this one has "
                f"{value!r}; make them equal"
            )
    return state["records"]


def _of_environment(name, given, default):
    if given is not None:
        return given
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r} in the environment; it must be a number") from None
