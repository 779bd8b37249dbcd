"""Jobs of models whose parameters are a flat array."""

from . import _elasticdl
from ._checks import check_count
from ._inference import Evaluator, Predictor
from ._process import process
from ._worker import Calls, Worker


def join():
    """Joins the job that launched this process, and returns a :class:`Job`.

    Without a launcher, the job is a group of one, and a process may join another one later. A
    process that was launched joins once.
    """
    return process.join(Job)


class AnyJob:
    """What jobs of all kinds of models have."""

    def __init__(self, core):
        self._worker = Worker(core, self._begin)

    def _begin(self):
        """Starts the trainer, at the first draw."""
        raise NotImplementedError

    def _advice(self, error):
        """What to do about an error that ends the program; None if there is nothing to say."""
        del error

    # ---- what the group does; for information only ----

    @property
    def generation(self):
        """Number of the group's membership; 0 before the first."""
        return self._worker.progress("generation")

    @property
    def rank(self):
        """Index of this worker in its group."""
        return self._worker.progress("rank")

    @property
    def is_main(self):
        """Whether this worker has rank 0: for what one worker does, such as saving a file after
        the loop. Known from the first draw on."""
        core = self._worker.core
        if self.world_size == 0 and core is not None and not core.is_alone:
            raise RuntimeError("job.is_main is known when the first micro-batch was drawn")
        return self.rank == 0

    def print(self, *values, sep=" ", end="\n"):
        """As ``print()``, on the main worker alone, for the console of a local job. Before the
        first draw, it is the first worker that the job has started."""
        core = self._worker.core
        if core is None or core.is_alone:
            print(*values, sep=sep, end=end)
        elif self._acts_for_all():
            # The command shows lines that begin so.
            text = sep.join(map(str, values)).replace("\n", "\n\x1e")
            print("\x1e" + text, end=end, flush=True)

    def _acts_for_all(self):
        """Whether this worker is the main one; before the first draw, the one that started first."""
        core = self._worker.core
        if self.world_size or core is None or core.is_alone:
            return self.rank == 0
        return core.id <= 1

    @property
    def world_size(self):
        """Number of workers in the group; 0 before the first group."""
        return self._worker.progress("world_size")

    @property
    def step(self):
        """Number of committed steps."""
        return self._worker.progress("step")

    @property
    def epoch(self):
        """Epoch of the next step, from 0."""
        return self._worker.progress("epoch")

    @property
    def records(self):
        """Number of records that the committed steps contain."""
        return self._worker.progress("records")

    @property
    def work(self):
        """What the job does: "train", "evaluate" or "predict"."""
        core = self._worker.core
        return "train" if core is None else core.work

    @property
    def data(self):
        """Value of ``--training-data`` or ``--data``; None if there is none."""
        core = self._worker.core
        return None if core is None else core.data

    @property
    def validation_data(self):
        """Value of ``--validation-data``; None if there is none."""
        core = self._worker.core
        return None if core is None else core.validation_data

    @property
    def micro_batch(self):
        """Records of the micro-batch that is computed now: drawn first, and not delivered."""
        if not self._worker.drawn:
            raise RuntimeError("no micro-batch is computed now: draw one from the sampler")
        return list(self._worker.drawn[0])

    # ---- random numbers ----

    @property
    def seed(self):
        """Seed of the job. Without a master it is known when the sampler is made."""
        if self._worker.core is None:
            raise RuntimeError("call job.sampler() before the seed is used")
        return self._worker.core.options.seed

    def seed_for(self, *, record=None, step=None, epoch=None, stream=0):
        """Returns a seed for random numbers that belong to a record, or to a step.

        It depends on the job's seed and these arguments alone, so a record or a step gets the same
        random numbers whichever worker computes it, and again if it is computed twice. ``epoch``:
        of the record; default: that of the micro-batch which is computed now. ``stream``
        distinguishes several uses.
        """
        if (record is None) == (step is None):
            raise TypeError("seed_for() takes either record or step")
        check_count("stream", stream, 0)
        if step is not None:
            check_count("step", step, 0)
            return _elasticdl.seed_of_step(self.seed, step, stream)
        check_count("record", record, 0)
        if epoch is None:
            epoch = self.micro_batch[0].epoch
        check_count("epoch", epoch, 0)
        return _elasticdl.seeds_of_records(self.seed, epoch, [record], stream)[0]

    # ---- data ----

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
        return self._worker.sampler(
            length,
            micro_batch,
            global_batch=global_batch,
            epochs=epochs,
            max_steps=max_steps,
            seed=seed,
            shuffle=shuffle,
        )

    def epochs(self):
        """Yields the numbers of the epochs that this worker trains in, from 0, until the job ends.

        In each of them, a loop over the sampler, or its loader, yields the micro-batches of this
        epoch, once. A worker that joins later begins with the epoch of its group. All workers go
        through an epoch together: what the loop does between two of them, each worker does.
        """
        return self._worker.epochs()

    @property
    def steps(self):
        """Number of steps in all epochs, for a schedule; ``--max-steps`` may end the job earlier.
        None if it depends on the workers, with ``--minibatch-size``."""
        return self._worker.steps

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
        self._worker.wait()

    def report(self, name, mean):
        """Reports a metric of the micro-batch that is delivered next, a mean over its records.

        Users see the mean over all records, smoothed like the loss: in the status, the progress,
        TensorBoard, MLflow and the Prometheus metrics. Each micro-batch reports the same metrics.
        """
        self._worker.core.report(name, float(mean))


class Job(AnyJob):
    """A job, as one of its workers sees it. To be used by one thread."""

    def __init__(self, core):
        super().__init__(core)
        self._model = None

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
        self._worker.not_begun("model()")
        check_count("parameters", parameters, 1)
        check_count("state", state, 0)
        initialize = initialize or (lambda seed: None)
        update = update or self._add_mean
        calls = Calls(
            initialize=lambda seed, address: initialize(seed),
            update=lambda step, records, loads, address: update(step, records),
            load=lambda trains: None,
        )
        tensors = [(name, [parameters])]
        self._model = {"tensors": tensors, "state": state * parameters, "calls": calls}

    def evaluator(self, length, function=None, *, micro_batch=64):
        """Says how the model is evaluated, on a data set of ``length`` records.

        ``function(indices)`` returns the metrics of at most ``micro_batch`` records, by name: each
        the mean over the records, or one value per record. It is called with ``elasticdl
        evaluate``, and in training with ``--validation-data``; the results are means over all
        records. It reads :attr:`parameters`. Without ``function``, returns a decorator for it.
        """
        evaluator = Evaluator(length, micro_batch, lambda function, indices: function(indices))
        return self._worker.evaluator(evaluator, function)

    def predictor(self, length, function=None, *, micro_batch=64):
        """Says how the model makes predictions, for a data set of ``length`` records.

        ``function(indices)`` returns columns by name, each with one number or text per record. It
        is called with ``elasticdl predict``, which writes them. Otherwise as :meth:`evaluator`.
        """
        predictor = Predictor(length, micro_batch, lambda function, indices: function(indices))
        return self._worker.predictor(predictor, function)

    # ---- memory ----

    @property
    def parameters(self):
        """The parameters, a writable view of f32."""
        return self._view("parameters")

    @property
    def gradient(self):
        """The gradient of one micro-batch, a writable view of f32. ``commit()`` clears it."""
        return self._view("gradient")

    @property
    def state(self):
        """The optimizer state, a writable view of f32."""
        return self._view("state")

    def _view(self, name):
        if self._worker.started is None:
            raise RuntimeError("there is no memory before the first micro-batch is drawn")
        return memoryview(getattr(self._worker.started, name)).cast("f")

    # ---- training ----

    def commit(self, loss=0.0, *, reduction="mean"):
        """Delivers :attr:`gradient`, that of the micro-batch drawn first.

        ``loss`` and the gradient are the mean over the micro-batch's records, or with
        ``reduction="sum"`` the gradient is the sum. Waits until the step is committed, or until
        the group needs more records of this worker for it. Returns whether a step was committed.
        If workers are lost meanwhile, the step is repeated with the gradients that exist.
        """
        return self._worker.deliver(loss, reduction).committed

    def _begin(self):
        if self._worker.started is not None:
            return
        if self._model is None:
            raise RuntimeError("call job.model() before the first micro-batch is drawn")
        self._worker.start(**self._model, is_direct=False)

    def _add_mean(self, step, records):
        del step
        parameters, gradient = self.parameters, self.gradient
        for i, value in enumerate(gradient):
            parameters[i] += value / records
