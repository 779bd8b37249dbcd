"""Jobs of models whose parameters are a flat array."""

import atexit
import collections
import faulthandler
import os
import signal
import sys
import threading
import traceback

from . import _elasticdl
from ._inference import Evaluator, Predictor


def join():
    """Joins the job that launched this process, and returns a :class:`Job`.

    Without a launcher, the job is a group of one. A process joins once.
    """
    return _join(Job)


def _join(kind):
    if _process.job is not None:
        raise RuntimeError("this process has joined its job already; call join() once")
    _register_stacks()
    job = kind(_elasticdl.Core.join())
    _process.enter(job)
    return job


def _register_stacks():
    """Lets a worker that hangs write the stacks of its threads to its log."""
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL and sys.__stderr__ is not None:
        try:
            faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)
        except (OSError, ValueError, AttributeError):
            # Standard error is closed: there is no log.
            pass


class Job:
    """A job, as one of its workers sees it. To be used by one thread."""

    def __init__(self, core):
        self._core = core
        self._progress = None
        self._model = None
        self._sampler = None
        self._evaluator = None
        self._predictor = None
        self._memory = None
        self._drawn = collections.deque()
        self._absorbed = 0
        self._ended = False

    # ---- what the group does; for information only ----

    @property
    def generation(self):
        """Number of the group's membership; 0 before the first."""
        return self._known("generation")

    @property
    def rank(self):
        """Index of this worker in its group."""
        return self._known("rank")

    @property
    def world_size(self):
        """Number of workers in the group; 0 before the first group."""
        return self._known("world_size")

    @property
    def step(self):
        """Number of committed steps."""
        return self._known("step")

    @property
    def epoch(self):
        """Epoch of the next step, from 0."""
        return self._known("epoch")

    @property
    def records(self):
        """Number of records that the committed steps contain."""
        return self._known("records")

    @property
    def work(self):
        """What the job does: "train", "evaluate" or "predict"."""
        return "train" if self._core is None else self._core.work

    @property
    def data(self):
        """Value of ``--training-data`` or ``--data``; None if there is none."""
        return None if self._core is None else self._core.data

    @property
    def validation_data(self):
        """Value of ``--validation-data``; None if there is none."""
        return None if self._core is None else self._core.validation_data

    @property
    def micro_batch(self):
        """Records of the micro-batch that is computed now: drawn first, and not delivered."""
        if not self._drawn:
            raise RuntimeError("no micro-batch is computed now: draw one from the sampler")
        return list(self._drawn[0])

    # ---- random numbers ----

    @property
    def seed(self):
        """Seed of the job. Without a master it is known when the sampler is made."""
        if self._core is None:
            raise RuntimeError("call job.sampler() before the seed is used")
        return self._core.options.seed

    def seed_for(self, *, record=None, step=None, epoch=None, stream=0):
        """Returns a seed for random numbers that belong to a record, or to a step.

        It depends on the job's seed and these arguments alone, so a record or a step gets the same
        random numbers whichever worker computes it, and again if it is computed twice. ``epoch``:
        of the record; default: that of the micro-batch which is computed now. ``stream``
        distinguishes several uses.
        """
        if (record is None) == (step is None):
            raise TypeError("seed_for() takes either record or step")
        _check_count("stream", stream, 0)
        if step is not None:
            _check_count("step", step, 0)
            return _elasticdl.seed_of_step(self.seed, step, stream)
        _check_count("record", record, 0)
        if epoch is None:
            epoch = self.micro_batch[0].epoch
        _check_count("epoch", epoch, 0)
        return _elasticdl.seeds_of_records(self.seed, epoch, [record], stream)[0]

    def _known(self, name):
        return 0 if self._progress is None else getattr(self._progress, name)

    # ---- setting up ----

    def model(self, parameters, *, state=0, initialize=None, update=None, name="parameters"):
        """Declares a model of ``parameters`` numbers (f32).

        ``state``: numbers of optimizer state per parameter, initially zero.
        ``initialize(seed)`` writes the initial :attr:`parameters`; it is called on one worker, and
        the others receive the result. Default: zeros. ``update(step, records)`` changes
        :attr:`parameters` and :attr:`state` by :attr:`gradient`, the sum over ``records`` records;
        it is called on every worker, so its result must depend on these alone. Default: adds the
        gradient's mean to the parameters.
        """
        self._not_begun("model()")
        _check_count("parameters", parameters, 1)
        _check_count("state", state, 0)
        self._model = {
            "tensors": [(name, [parameters])],
            "slots": state,
            "initialize": initialize or (lambda seed: None),
            "update": update or self._add_mean,
        }

    def sampler(
        self,
        length,
        *,
        micro_batch=32,
        global_batch=None,
        epochs=None,
        max_steps=None,
        seed=None,
        shuffle=None,
    ):
        """Returns the :class:`Sampler` of a data set of ``length`` records.

        ``micro_batch``: maximum number of records per micro-batch. ``global_batch``: records per
        step over all workers. ``epochs``, ``max_steps``: when to end. ``seed``, ``shuffle``: of
        the order, which depends on nothing else. Step ``s`` has the records at the positions
        ``s * global_batch`` to ``(s + 1) * global_batch`` of the order, whatever the workers are.

        In a job with a master the options of the job decide; other values here are errors, but
        ``max_steps`` has no effect. Without a master the defaults are ``micro_batch`` records, one
        epoch, no limit, seed 0, and to shuffle.
        """
        self._not_begun("sampler()")
        _check_count("length", length, 1)
        _check_count("micro_batch", micro_batch, 1)
        numbers = {"global_batch": global_batch, "epochs": epochs, "max_steps": max_steps}
        for name, value in {**numbers, "seed": seed}.items():
            if value is not None:
                _check_count(name, value, int(name != "seed"))
        if shuffle not in (None, False, True):
            raise TypeError(f"shuffle is {shuffle!r}; it must be a bool")
        if self._core is None:
            self._core = _elasticdl.Core.alone(
                epochs or 1, max_steps, global_batch or micro_batch, seed or 0, shuffle is not False
            )
        else:
            options = self._core.options
            _check_option("seed", seed, options.seed, "--seed")
            if shuffle not in (None, options.shuffles):
                right = "record" if shuffle else "none"
                raise ValueError(
                    f"shuffle is {shuffle}, but the job was not started so; start it with "
                    f"--shuffle {right}, or leave shuffle out"
                )
            _check_option("epochs", epochs, options.epochs, "--num-epochs")
            if global_batch is not None and options.global_batch is None:
                raise ValueError(
                    f"global_batch is {global_batch}, but the job was started with "
                    f"--minibatch-size {options.per_worker}; leave global_batch out"
                )
            _check_option(
                "global_batch", global_batch, options.global_batch, "--global-batch-size"
            )
        options = self._core.options
        order = options.seed if options.shuffles else None
        self._sampler = Sampler(_JobGroup(self), length, micro_batch, order)
        return self._sampler

    def evaluator(self, length, function=None, *, micro_batch=64):
        """Says how the model is evaluated, on a data set of ``length`` records.

        ``function(indices)`` returns the metrics of at most ``micro_batch`` records, by name: each
        the mean over the records, or one value per record. It is called with ``elasticdl
        evaluate``, and in training with ``--validation-data``; the results are means over all
        records. It reads :attr:`parameters`. Without ``function``, returns a decorator for it.
        """
        evaluator = Evaluator(length, micro_batch, lambda function, indices: function(indices))
        return self._declare("evaluator", evaluator, function)

    def predictor(self, length, function=None, *, micro_batch=64):
        """Says how the model makes predictions, for a data set of ``length`` records.

        ``function(indices)`` returns columns by name, each with one number or text per record. It
        is called with ``elasticdl predict``, which writes them. Otherwise as :meth:`evaluator`.
        """
        predictor = Predictor(length, micro_batch, lambda function, indices: function(indices))
        return self._declare("predictor", predictor, function)

    def _declare(self, what, declared, function):
        self._not_begun(f"{what}()")
        _check_count("length", declared.length, 1)
        _check_count("micro_batch", declared.micro_batch, 1)
        if getattr(self, f"_{what}") is not None:
            raise RuntimeError(f"a job has one {what}; call job.{what}() once")
        setattr(self, f"_{what}", declared)
        return declared if function is None else declared(function)

    def run(self):
        """Evaluates or predicts, for a program that has no loop over a sampler. Does not return.

        A job that trains has no use for it.
        """
        if self.work == "train":
            raise RuntimeError(
                "job.run() is for elasticdl evaluate and elasticdl predict; to train, loop over "
                "job.sampler()"
            )
        self._begin()
        self._wait()

    # ---- memory ----

    @property
    def parameters(self):
        """The parameters, a writable view of f32."""
        return self._view(0)

    @property
    def gradient(self):
        """The gradient of one micro-batch, a writable view of f32. ``commit()`` clears it."""
        return self._view(1)

    @property
    def state(self):
        """The optimizer state, a writable view of f32."""
        return self._view(2)

    def _view(self, index):
        if self._memory is None:
            raise RuntimeError("there is no memory before the first micro-batch is drawn")
        return memoryview(self._memory[index]).cast("f")

    # ---- training ----

    def report(self, name, mean):
        """Reports a metric of the micro-batch that is delivered next, a mean over its records.

        Users see the mean over all records, smoothed like the loss: in the status, the progress,
        TensorBoard, MLflow and the Prometheus metrics. Each micro-batch reports the same metrics.
        """
        self._core.report(name, float(mean))

    def commit(self, loss=0.0, *, reduction="mean"):
        """Delivers :attr:`gradient`, that of the micro-batch drawn first.

        ``loss`` and the gradient are the mean over the micro-batch's records, or with
        ``reduction="sum"`` the gradient is the sum. Waits until the step is committed, or until
        the group needs more records of this worker for it. Returns whether a step was committed.
        If workers are lost meanwhile, the step is repeated with the gradients that exist.
        """
        return self._commit(loss, reduction)[1]

    def _commit(self, loss, reduction):
        """Returns whether the micro-batch counts, and whether a step was committed."""
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
        if self._memory is None:
            raise RuntimeError("there is no micro-batch to deliver: draw one from the sampler")
        before = self.step
        counts = self._core.deliver(float(loss), reduction == "mean")
        self._drawn.popleft()
        if counts:
            self._wait()
        return counts, self.step > before

    def _wait(self):
        self._ended = self._ended or not self._core.wait()

    def _begin(self):
        """Starts the trainer, at the first draw."""
        if self._memory is not None:
            return
        if self._model is None:
            raise RuntimeError("call job.model() before the first micro-batch is drawn")
        self._start(**self._model)

    def _start(self, tensors, slots, initialize, update):
        def run_update(step, records, loads, address):
            del loads, address
            update(step, records)

        callbacks = (lambda seed, address: initialize(seed), run_update, lambda: None)
        self._launch(tensors, slots, callbacks, is_direct=False)

    def _launch(self, tensors, slots, callbacks, *, is_direct, bucket_len=None, on_gpu=None):
        sampler, evaluator, predictor = self._sampler, self._evaluator, self._predictor
        *memory, self._progress = self._core.start(
            records=0 if sampler is None else sampler.length,
            tensors=tensors,
            slots=slots,
            micro_batch=1 if sampler is None else sampler.micro_batch,
            absorbed=self._absorbed,
            bucket_len=bucket_len,
            is_direct=is_direct,
            on_gpu=on_gpu,
            evaluation=None if evaluator is None else evaluator.data,
            prediction=None if predictor is None else predictor.data,
            callbacks=(
                *callbacks,
                *(None if each is None else each.run for each in (evaluator, predictor)),
            ),
        )
        self._memory = memory

    def _add_mean(self, step, records):
        del step
        parameters, gradient = self.parameters, self.gradient
        for i, value in enumerate(gradient):
            parameters[i] += value / records

    def _not_begun(self, what):
        if self._memory is not None:
            raise RuntimeError(f"{what} must be called before the first micro-batch is drawn")


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
        _check_count("stream", stream, 0)
        return _elasticdl.seeds_of_records(self._job_seed, self.epoch, [int(self)], stream)[0]


class Sampler:
    """Yields lists of :class:`Record`: the micro-batches of this worker, until the job is complete.

    An iterator for one ``for`` loop over all epochs, or the ``batch_sampler`` of a PyTorch
    ``DataLoader``, which may load ahead. Each micro-batch must be delivered once, in order: by the
    step of the job, or by :meth:`commit`. What was drawn and not committed when this worker ends is
    trained by others.
    """

    def __init__(self, group, length, micro_batch, seed):
        self._group = group
        self.length = length
        self.micro_batch = micro_batch
        self.seed = seed

    def __iter__(self):
        return self

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
        _check_count("the number of records of the state", state.get("records"), 0)
        for name, value in ("length", self.length), ("seed", self.seed):
            # At the end of an epoch, any order may follow.
            if state.get(name) != value and (name == "length" or state["records"] % self.length):
                raise ValueError(
                    f"the state is of a sampler with {name} {state.get(name)!r}, and this one has "
                    f"{value!r}; make them equal"
                )
        self._group.load(state["records"])


class _JobGroup:
    """The micro-batches of a worker of a job."""

    def __init__(self, job):
        self._job = job

    generation = property(lambda self: self._job.generation)
    rank = property(lambda self: self._job.rank)
    world_size = property(lambda self: self._job.world_size)
    step = property(lambda self: self._job.step)
    records = property(lambda self: max(self._job.records, self._job._absorbed))

    def draw(self):
        job = self._job
        job._begin()
        batch = job._core.next_batch()
        if batch is not None and not batch[1]:
            job._wait()
            batch = None if job._ended else job._core.next_batch()
        if batch is None or not batch[1]:
            raise StopIteration
        epoch, indices = batch
        records = [Record(index, epoch, job.seed) for index in indices]
        job._drawn.append(records)
        return list(records)

    def commit(self):
        return self._job.commit()

    def load(self, records):
        self._job._not_begun("load_state_dict()")
        self._job._absorbed = records


class _Process:
    """What a process does for its job beside training."""

    def __init__(self):
        self.job = None
        self.pid = None
        self.excepthook = None

    def enter(self, job):
        self.job, self.pid = job, os.getpid()
        self.excepthook = sys.excepthook
        sys.excepthook = self.on_exception
        atexit.register(self.on_exit)
        os.register_at_fork(after_in_child=self.on_fork)

    def on_exception(self, kind, error, trace):
        if os.getpid() == self.pid and not issubclass(kind, KeyboardInterrupt):
            self.fail("".join(traceback.format_exception(kind, error, trace)).strip())
        self.excepthook(kind, error, trace)

    def on_exit(self):
        if os.getpid() == self.pid and not self.job._ended:
            self.fail("the program ended before its job; the loop over the data must not be left")

    def fail(self, text):
        core = self.job._core
        if core is not None:
            try:
                core.fail(text)
            except RuntimeError:
                # Another thread uses it; the process ends without a report.
                pass

    def on_fork(self):
        """In a forked process, such as a worker of a DataLoader."""
        if threading.current_thread() is threading.main_thread():
            _elasticdl.die_with_parent()
            # The handler of the native code is of the parent process.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


_process = _Process()


def _check_count(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an int")
    if not least <= value < 1 << 63:
        raise ValueError(f"{name} is {value}; it must be at least {least} and below 2**63")


def _check_option(name, value, of_job, option):
    if value is not None and value != of_job:
        raise ValueError(
            f"{name} is {value}, but the job was started with {option} {of_job}; make them equal, "
            f"or leave {name} out"
        )
