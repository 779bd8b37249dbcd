"""Jobs of PyTorch models."""

import torch

from .. import _elasticdl
from .._inference import Evaluator, Predictor
from .._job import AnyJob
from .._process import process
from ._advice import advice
from ._divided import Divided, Loops
from ._inference import Applied, Batches
from ._meeting import Meeting
from ._module import check_module, tensors_of
from ._objects import Objects
from ._optimizer import Optimizer
from ._random import number_modules
from ._scaler import NO_SCALER, Scaler
from ._tables import Embedding, EmbeddingBag, Lifetime, RowBatches, Rows
from ._training import Training


def join():
    """Joins the job that launched this process, and returns a :class:`Job`.

    Without a launcher, the job is a group of one, and a process may join another one later. A
    process that was launched joins once.
    """
    return process.join(Job)


class Job(AnyJob):
    """A job that trains one ``torch.nn.Module``, on the CPU or on a GPU."""

    def __init__(self, core):
        super().__init__(core)
        self._net = None
        self._training = None
        self._objects = Objects()
        self._scaler = None
        self._rows = Rows(self._worker)
        self._meeting = Meeting(self._worker)
        self._loops = Loops(self._meeting)

    @property
    def device(self):
        """The CUDA device of this worker; the CPU where there is none. Workers of one machine take
        its GPUs in turn."""
        if torch.cuda.is_available():
            return torch.device("cuda", _elasticdl.gpu_ordinal())
        return torch.device("cpu")

    def model(self, net):
        """Declares the module to train, and returns it.

        Its parameters and buffers come from the group when training begins: on one worker they are
        the module's own. Parameters are f32 tensors, on the CPU or all on one CUDA device, such as
        :attr:`device`; all workers of a job are on CPUs, or all on GPUs. On a GPU, the first draw
        makes the trainer's stream the current one of its thread in the place of the default stream;
        work that the program enqueues on another stream, or in another thread, is ordered with it
        at each call. PyTorch's allocator then holds the parameters and two gradients beside the
        optimizer's state. A buffer becomes, with each step, the mean over all workers, weighted by
        their records.
        """
        self._worker.not_begun("model()")
        if not isinstance(net, torch.nn.Module):
            raise TypeError(f"job.model() takes a torch.nn.Module, not {type(net).__name__}")
        if self._net is not None:
            raise RuntimeError(
                "a job trains one module; call job.model() once, with all parts: "
                "job.model(torch.nn.ModuleList([first, second]))"
            )
        check_module(net)
        number_modules(net)
        self._net = net
        return net

    def optimizer(
        self, optimizer, *, reduction="mean", clip_norm=None, overlap=True, unfreezes=False
    ):
        """Declares an optimizer, and returns the :class:`Optimizer` to use in its place.

        A job may have several, of different parameters of the module. Each of them steps once for
        each micro-batch, with the gradients that its parameters have then. When the last one has,
        the micro-batch is delivered, and with the step of the group all of them change their
        parameters: a record counts once, for all. Until then no parameter changes, so a loss that
        follows the step of one optimizer is still that of its old parameters.

        ``reduction``: whether the loss is a mean or a sum over a micro-batch's records. With
        "mean", a step's gradient is the mean over all its records. ``clip_norm``: maximum norm of
        the step's gradient, as ``torch.nn.utils.clip_grad_norm_`` clips it. ``overlap``: whether
        the backward pass of a step's last micro-batch hands its gradients over as it computes
        them, so that they are summed meanwhile. Each micro-batch then has one backward pass, and
        its gradients are not changed afterwards. ``unfreezes``: whether the loop may unfreeze
        parameters of the optimizer that are frozen when training begins; they take memory for
        their state from the beginning on.
        """
        self._worker.not_begun("optimizer()")
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"job.optimizer() takes a torch.optim.Optimizer, not {kind}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm is {clip_norm}; it must be above 0")
        for name, value in ("overlap", overlap), ("unfreezes", unfreezes):
            if value not in (False, True):
                raise TypeError(f"{name} is {value!r}; it must be a bool")
        training = self._training or Training(self, reduction)
        mine = Optimizer(training, self._worker, optimizer)
        training.add(
            mine,
            optimizer,
            reduction=reduction,
            clip_norm=clip_norm,
            overlap=overlap,
            unfreezes=unfreezes,
        )
        self._training = training
        return mine

    def scaler(self, scaler):
        """Returns the :class:`Scaler` to use in place of a ``torch.amp.GradScaler``.

        ``scaler.step(opt, loss)`` calls ``opt.step(loss)``. The scale is a part of the group's
        state.
        """
        self._worker.not_begun("scaler()")
        if not isinstance(scaler, torch.amp.GradScaler):
            kind = type(scaler).__name__
            raise TypeError(f"job.scaler() takes a torch.amp.GradScaler, not {kind}")
        mine = Scaler(scaler)
        self.state("the scaler", mine)
        self._scaler = mine if mine.is_enabled() else None
        return mine

    def embedding(
        self,
        name,
        dim,
        *,
        optimizer=None,
        bound=0.05,
        admitted_after=1,
        evicted_after=None,
        evicted_below=None,
    ):
        """Declares an embedding table, and returns a module that looks rows up.

        As ``torch.nn.Embedding``, for any ids of 64 bits: the workers of the job divide the rows of
        ``dim`` numbers. A row comes into being when a step touches it; before, it is uniform in
        ±``bound``, by the job's seed, the table and the id alone. ``optimizer``: how rows change, a
        :class:`RowAdagrad`, :class:`RowAdam` or :class:`RowSGD`. Default: ``RowSGD(lr=0.01)``. All
        workers declare the same tables, in the same order.

        ``admitted_after``: touches with which a row comes into being. Until then it takes 16 bytes,
        and its gradients have no effect. ``evicted_after``: steps without a touch after which a row
        is removed. ``evicted_below``: a row is removed if the L2 norm of its values is below this.
        """
        lifetime = Lifetime(admitted_after, evicted_after, evicted_below)
        return self._table(Embedding, name, dim, optimizer, bound, lifetime)

    def embedding_bag(
        self,
        name,
        dim,
        *,
        mode="mean",
        optimizer=None,
        bound=0.05,
        admitted_after=1,
        evicted_after=None,
        evicted_below=None,
    ):
        """As :meth:`embedding`, with the sum or mean of the rows of each record's ids, as
        ``torch.nn.EmbeddingBag``. ``mode``: "mean" or "sum"."""
        if mode not in ("mean", "sum"):
            raise ValueError(f"mode is {mode!r}; it must be 'mean' or 'sum'")
        lifetime = Lifetime(admitted_after, evicted_after, evicted_below)
        return self._table(EmbeddingBag, name, dim, optimizer, bound, lifetime, mode=mode)

    def _table(self, kind, name, dim, optimizer, bound, lifetime, **settings):
        self._worker.not_begun(f"the table {name!r}")
        return self._rows.add(kind, name, dim, optimizer, bound, lifetime, **settings)

    def batches(self, loader, ids):
        """The batches of a loader, each yielded once the rows of the job's tables are there for it.
        A loop over them is one over the loader.

        ``loader`` draws from :meth:`sampler`. ``ids(batch)`` returns the ids of a batch by table: a
        tensor of int64 whose first dimension is the batch's records, a pair of ids and offsets, as
        ``EmbeddingBag`` takes them, or a list of these if a record looks up several. A record
        touches each of its ids once. Rows are looked up once per step, for all batches of this
        worker in it: until then, they are kept.
        """
        if not callable(ids):
            raise TypeError(f"ids is {ids!r}; it must be a function of a batch")
        if not self._rows.declared():
            raise RuntimeError(
                "job.batches() is for jobs with tables, and this one has none; loop over the loader"
            )
        return RowBatches(self._worker, self._rows, loader, ids)

    def evaluator(
        self, dataset, function=None, *, micro_batch=64, collate=None, ids=None
    ):
        """Says how the module is evaluated, on a map-style data set.

        ``function`` gets a micro-batch of at most ``micro_batch`` elements, as a ``DataLoader``
        gives it to its loop: ``function(x, y)`` for a data set of pairs. It returns metrics by
        name: each the mean over the micro-batch, or a tensor with one value per record. It is
        called with ``elasticdl evaluate``, and in training with ``--validation-data``, in
        evaluation mode and without gradients; the results are means over all records. ``collate``:
        makes a micro-batch of a list of elements. Default: as a ``DataLoader`` does. ``ids``: the
        ids of a micro-batch, as of :meth:`batches`. Without ``function``, returns a decorator for
        it.
        """
        data = Batches(self, dataset, collate, ids)
        evaluator = Evaluator(len(dataset), micro_batch, data.call, data.features)
        return self._worker.evaluator(evaluator, function)

    def predictor(
        self, dataset, function=None, *, micro_batch=64, collate=None, ids=None
    ):
        """Says how the module makes predictions, for a map-style data set.

        ``function`` returns columns by name: tensors of one dimension, or lists of numbers or text,
        with one element per record. It is called with ``elasticdl predict``, which writes them.
        Otherwise as :meth:`evaluator`.
        """
        data = Batches(self, dataset, collate, ids)
        predictor = Predictor(len(dataset), micro_batch, data.call, data.features)
        return self._worker.predictor(predictor, function)

    def divided(self, loader):
        """The batches of a loader, for an evaluation whose batches the workers divide.

        ::

            test = job.divided(DataLoader(test_set, batch_size=64))
            for epoch in job.epochs():
                train(data)
                for x, y in test:
                    scores, labels = job.gather_for_metrics((model(x), y))

        ``loader``: a ``DataLoader`` of a map-style data set, without shuffle, the same on all
        workers. Each worker loops over it, between two steps of the job. A loop yields the batches
        that this worker computes, about ``len(test)`` divided by the number of workers, and
        :meth:`gather_for_metrics` returns the values of all. The workers of a loop are those that
        have computed records of the step before; another one, such as one that has just joined,
        computes all batches, as one that trains alone does.
        """
        self._worker.not_begun("divided()")
        if self._rows.declared():
            raise RuntimeError("a job with tables is evaluated by job.evaluator()")
        self._meeting.declare()
        return Divided(self._loops, loader)

    def gather_for_metrics(self, values):
        """The values of all workers for a batch of :meth:`divided`, without those of batches that
        were computed twice.

        ``values``: a tensor whose first dimension is the batch's records, or one number for the
        batch, or a list, tuple or dict of such tensors. Called once for each batch of the loop. Its
        results, one after the other, are the values of all batches in the order of the loader, each
        once and on each worker, also if workers are lost: the others then compute the batches whose
        values they lack, each for itself, and a call may return tensors without records until the
        values before those of its batch are there.
        """
        return self._loops.gather(values)

    def generator(self, *, record=None, step=None, epoch=None, stream=0, device="cpu"):
        """Returns a ``torch.Generator`` that belongs to a record or a step; see ``seed_for()``."""
        seed = self.seed_for(record=record, step=step, epoch=epoch, stream=stream)
        return torch.Generator(device).manual_seed(seed)

    def state(self, name, value, on_commit=None, on_epoch=None):
        """Adds an object with ``state_dict()`` and ``load_state_dict()`` to the group's state.

        Workers that join receive it. It may change in ``on_commit`` and ``on_epoch`` alone, which
        are called on every worker, after each committed step and before the first step of each
        epoch but the first: ``job.state("schedule", s, on_epoch=s.step)``.
        """
        self._worker.not_begun("state()")
        if isinstance(value, torch.amp.GradScaler):
            raise TypeError(f"job.state({name!r}): {NO_SCALER}")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise TypeError(f"job.state({name!r}): {type(value).__name__} has no {method}()")
        if name in self._objects.by_name:
            raise ValueError(f"job.state({name!r}): there is one of this name already")
        self._objects.add(name, value, on_commit, on_epoch)

    def _advice(self, error):
        return advice(error, self)

    def _begin(self):
        if self._worker.started is not None:
            return
        if self._net is None:
            raise RuntimeError("call job.model() before the first micro-batch is drawn")
        if self.work != "train":
            trainable, frozen, buffers = tensors_of(self._net)
            Applied(self, frozen + trainable, buffers).begin()
            return
        if self._training is None:
            raise RuntimeError("call job.optimizer() before the first micro-batch is drawn")
        self._training.begin()
