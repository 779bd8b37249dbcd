"""Samplers of the records of a data set."""

from . import _elasticdl
from ._checks import check_count


class Record(int):
    """Index of a record, with the epoch that it is drawn for."""

    def __new__(cls, index, epoch, job_seed):
        record = super().__new__(cls, index)
        record.epoch = epoch
        record._job_seed = job_seed
        return record

    def __getnewargs__(self):
        return int(self), self.epoch, self._job_seed

    def seed_for(self, stream=0):
        """As ``seed_for()`` of the job. For data sets, in any process."""
        check_count("stream", stream, 0)
        return _elasticdl.seeds_of_records(self._job_seed, self.epoch, [int(self)], stream)[0]


class Sampler:
    """Yields lists of :class:`Record`: the micro-batches of this worker.

    An iterator for a ``for`` loop, or the ``batch_sampler`` of a PyTorch ``DataLoader``, which may
    load ahead. A loop ends with the epoch; several are in ``for epoch in sampler.epochs()``. Each
    micro-batch must be delivered once, in order: by the step of the job, or by :meth:`commit`. What
    was drawn and not committed when this worker ends is trained by others.
    """

    def __init__(self, group, length, micro_batch, seed):
        self._group = group
        self.length = length
        self.micro_batch = micro_batch
        self.seed = seed

    def epochs(self):
        """Yields the numbers of the epochs that are left, from 0, as ``Job.epochs()``: each has one
        loop over the sampler, or its loader."""
        return self._group.epochs()

    def __iter__(self):
        self._group.begin_pass()
        return self

    def __len__(self):
        """Number of steps in an epoch, the same on all workers, as schedules need it. A worker
        computes its part of a step in one or more micro-batches."""
        steps = self._group.steps_per_epoch
        if steps is None:
            raise TypeError(
                "with --minibatch-size the number of steps in an epoch depends on the workers; "
                "start the job with --global-batch-size to know it"
            )
        return steps

    def __next__(self):
        return self._group.draw()

    @property
    def generation(self):
        """Number of the group's membership; 0 before the first, and if its size is fixed."""
        return self._group.generation

    @property
    def rank(self):
        """Index of this worker in its group."""
        return self._group.rank

    @property
    def world_size(self):
        """Number of workers in the group; 0 before the first group."""
        return self._group.world_size

    @property
    def step(self):
        """Number of committed steps."""
        return self._group.step

    @property
    def records(self):
        """Number of committed records, over all epochs."""
        return self._group.records

    def commit(self):
        """The gradient of the micro-batch drawn first was used. Returns whether its step is over.

        For programs that reduce gradients by other means. In a job, waits until all workers have
        committed the records of the step, or until the group needs more records of this worker for
        it, because another one was lost. Otherwise the other ranks are assumed to be as far: call
        it after the collective that sums gradients.
        """
        return self._group.commit()

    def state_dict(self):
        """What is committed, the same on all workers at a step's end."""
        return {"format": 1, "length": self.length, "seed": self.seed, "records": self.records}

    def load_state_dict(self, state):
        """Continues after the committed records of a state of a group of any size.

        To be called on every worker, before the first draw. A group that has begun already goes on
        with its own records.
        """
        if not isinstance(state, dict) or state.get("format") != 1:
            raise ValueError("the state is not one that state_dict() of a sampler has returned")
        check_count("the number of records of the state", state.get("records"), 0)
        for name, value in ("length", self.length), ("seed", self.seed):
            # At the end of an epoch, any order may follow.
            if state.get(name) != value and (name == "length" or state["records"] % self.length):
                raise ValueError(
                    f"the state is of a sampler with {name} {state.get(name)!r}, and this one has "
                    f"{value!r}; make them equal"
                )
        self._group.load(state["records"])
