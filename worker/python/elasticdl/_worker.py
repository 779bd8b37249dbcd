"""A worker of a job, whatever its model is."""

import collections
import contextlib
import dataclasses

from . import _elasticdl
from ._checks import check_count, check_option
from ._passes import Passes
from ._randomness import Randomness
from ._sampler import Record, Sampler
from ._sources import loaded_sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calls:
    """What the trainer calls; see ``Core.start()``."""

    initialize: collections.abc.Callable
    update: collections.abc.Callable
    load: collections.abc.Callable
    gathered: collections.abc.Callable = lambda loads: None


@dataclasses.dataclass(frozen=True)
class Delivered:
    """Whether a micro-batch that was delivered counts, and whether its step was committed."""

    counts: bool
    committed: bool


class Worker(Passes):
    """A worker of a job. The jobs of this package have one."""

    def __init__(self, core, begin):
        """``begin()`` starts the trainer, at the first draw."""
        # Without a master, it is known when the sampler is made.
        self.core = core
        self.begin = begin
        # What the core returned when the trainer started.
        self.started = None
        # Makes the context in which the trainer acts.
        self.context = contextlib.nullcontext
        # The micro-batches that were drawn and not delivered, in order.
        self.drawn = collections.deque()
        # Number of records that the program's initial state has absorbed.
        self.absorbed = 0
        # Called before each draw.
        self.before_draw = lambda: None
        # Called before a micro-batch is computed whose gradient is compared with another worker's.
        self.before_compared = lambda batch: None
        self._randomness = Randomness()
        self._sampler = None
        self._evaluator = None
        self._predictor = None

    # ---- setting up ----

    def not_begun(self, what):
        """Refuses what must be called before training begins."""
        if self.started is not None:
            raise RuntimeError(f"{what} must be called before the first micro-batch is drawn")

    def sampler(self, length, micro_batch, *, global_batch, epochs, max_steps, seed, shuffle):
        """See ``Job.sampler()``."""
        self.not_begun("sampler()")
        check_count("length", length, 1)
        check_count("micro_batch", micro_batch, 1)
        numbers = {"global_batch": global_batch, "epochs": epochs, "max_steps": max_steps}
        for name, value in {**numbers, "seed": seed}.items():
            if value is not None:
                check_count(name, value, int(name != "seed"))
        if shuffle not in (None, False, True):
            raise TypeError(f"shuffle is {shuffle!r}; it must be a bool")
        if self.core is None:
            self.core = _elasticdl.Core.alone(
                epochs or 1, max_steps, global_batch or micro_batch, seed or 0, shuffle is not False
            )
        else:
            self._check_options(global_batch, epochs, seed, shuffle)
        options = self.core.options
        order = options.seed if options.shuffles else None
        self._sampler = Sampler(_JobGroup(self), length, micro_batch, order)
        return self._sampler

    def _check_options(self, global_batch, epochs, seed, shuffle):
        options = self.core.options
        check_option("seed", seed, options.seed, "--seed")
        if shuffle not in (None, options.shuffles):
            right = "record" if shuffle else "none"
            raise ValueError(
                f"shuffle is {shuffle}, but the job was not started so; start it with "
                f"--shuffle {right}, or leave shuffle out"
            )
        check_option("epochs", epochs, options.epochs, "--num-epochs")
        if global_batch is not None and options.global_batch is None:
            raise ValueError(
                f"global_batch is {global_batch}, but the job was started with "
                f"--minibatch-size {options.per_worker}; leave global_batch out"
            )
        check_option("global_batch", global_batch, options.global_batch, "--global-batch-size")

    @property
    def steps(self):
        """See ``Job.steps``."""
        if self._sampler is None:
            raise RuntimeError("call job.sampler() before the number of steps is used")
        steps = self.steps_per_epoch
        return None if steps is None else self.core.options.epochs * steps

    @property
    def steps_per_epoch(self):
        """Number of steps in an epoch; None if it depends on the workers."""
        batch = self.core.options.global_batch
        return None if batch is None else -(-self._sampler.length // batch)

    def evaluator(self, declared, function):
        """Declares the evaluation."""
        self._evaluator = self._only("evaluator", self._evaluator, declared)
        return declared if function is None else declared(function)

    def predictor(self, declared, function):
        """Declares the prediction."""
        self._predictor = self._only("predictor", self._predictor, declared)
        return declared if function is None else declared(function)

    def _only(self, what, before, declared):
        self.not_begun(f"{what}()")
        check_count("length", declared.length, 1)
        check_count("micro_batch", declared.micro_batch, 1)
        if before is not None:
            raise RuntimeError(f"a job has one {what}; call job.{what}() once")
        return declared

    def start(
        self,
        tensors,
        state,
        calls,
        *,
        is_direct,
        division=None,
        parts=(),
        clipped_from=None,
        bucket_len=None,
        on_gpu=None,
        tables=(),
        settings="",
    ):
        """Declares the model to the core, which returns its memory."""
        sampler = self._sampler
        self.started = self.core.start(
            records=0 if sampler is None else sampler.length,
            tensors=tensors,
            tables=list(tables),
            state=state,
            division=division,
            parts=list(parts),
            clipped_from=clipped_from,
            micro_batch=1 if sampler is None else sampler.micro_batch,
            absorbed=self.absorbed,
            bucket_len=bucket_len,
            is_direct=is_direct,
            on_gpu=on_gpu,
            evaluation=_if_declared(self._evaluator),
            prediction=_if_declared(self._predictor),
            sources=loaded_sources(),
            settings=settings,
            calls=calls,
        )

    # ---- training ----

    def progress(self, name):
        """A number of the group's progress; 0 before training begins."""
        return 0 if self.started is None else getattr(self.started.progress, name)

    def place(self):
        """Epoch and number of the next step."""
        return self.progress("epoch"), self.progress("step")

    def begin_epoch(self):
        """See ``Passes``."""
        if self._sampler is None:
            raise RuntimeError("call job.sampler() before job.epochs()")
        self.begin()
        epoch = None if self.epoch is None else self.progress("epoch")
        self._wait(epoch)
        # What is left of a loader that was not iterated to its end does not count any more.
        while self.drawn and not self.ended:
            self.core.deliver(0.0, True)
            self.drawn.popleft()
        if self.ended:
            return None
        if epoch is None:
            return self.progress("epoch")
        # Others may have trained the whole epoch meanwhile.
        self.may_be_empty = self.progress("epoch") > epoch
        return epoch

    def begin_pass(self):
        """A loop over the sampler begins."""
        if self.started is not None and self.core.work == "train":
            super().begin_pass()

    def draw(self):
        """The records of the next micro-batch; None if there is none."""
        self.begin()
        if self.core.work == "train":
            self.check_loop(self.core.options.epochs)
        self.before_draw()
        batch = self.core.next_batch(self.epoch)
        if batch is not None and batch.must_wait:
            self.wait()
            batch = None if self.ended else self.core.next_batch(self.epoch)
        if batch is None or batch.must_wait:
            return None
        seed = self.core.options.seed
        records = [Record(index, batch.epoch, seed) for index in batch.records]
        self.drawn.append(records)
        if len(self.drawn) == 1:
            self._prepare()
        return list(records)

    def _prepare(self):
        """The micro-batch that was drawn first is computed next."""
        if not self.core.options.audits:
            return
        batch = self.core.counted()
        if batch.is_compared:
            self.before_compared(batch)
            self._randomness.seed(self.drawn[0][0].seed_for(_STREAM))

    def deliver(self, loss, reduction):
        """Delivers the gradient of the micro-batch that was drawn first. Returns what became of it.

        Waits until the step is committed, or until the group needs more records of this worker for
        it.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
        if self.started is None:
            raise RuntimeError("there is no micro-batch to deliver: draw one from the sampler")
        before = self.progress("step")
        self._randomness.reset()
        counts = self.core.deliver(float(loss), reduction == "mean")
        self.drawn.popleft()
        if counts:
            self.wait()
        if self.drawn:
            self._prepare()
        return Delivered(counts, self.progress("step") > before)

    def wait(self):
        """Does what the trainer asks for, until it needs a gradient, the loop's epoch is complete,
        or all is."""
        self._wait(self.epoch)

    def _wait(self, epoch):
        # No step follows the last epoch, and a loop over it may be the program's end.
        until = None if epoch is None or epoch + 1 >= self.core.options.epochs else epoch
        with self.context():
            self.ended = self.ended or not self.core.wait(until)


class _JobGroup:
    """The micro-batches of a worker of a job."""

    def __init__(self, worker):
        self._worker = worker

    generation = property(lambda self: self._worker.progress("generation"))
    rank = property(lambda self: self._worker.progress("rank"))
    world_size = property(lambda self: self._worker.progress("world_size"))
    step = property(lambda self: self._worker.progress("step"))
    records = property(lambda self: max(self._worker.progress("records"), self._worker.absorbed))

    @property
    def steps_per_epoch(self):
        return self._worker.steps_per_epoch

    def epochs(self):
        return self._worker.epochs()

    def begin_pass(self):
        self._worker.begin_pass()

    def draw(self):
        records = self._worker.draw()
        if records is None:
            raise StopIteration
        return records

    def commit(self):
        started = self._worker.started
        if started is not None and not len(started.gradient):
            raise TypeError("a PyTorch model is trained by opt.step(), not by commit()")
        return self._worker.deliver(0.0, "mean").committed

    def load(self, records):
        self._worker.not_begun("load_state_dict()")
        self._worker.absorbed = records


def _if_declared(application):
    return None if application is None or application.function is None else application


# Of the random numbers of a micro-batch; those of programs begin at 0.
_STREAM = (1 << 63) - 1
