"""Embedding tables, whose rows the workers divide.

::

    job.batches()    next batches of the loader -- ids --> trainer: rows of all micro-batches
                     batch 0, batch 1, ...      <- rows --          of this worker in the step
    forward()        the rows of the ids, as a leaf of autograd
    opt.step(loss)   the leaf's gradient        -------> trainer, owners of the rows

**Invariant:** all workers look rows up once per step, so the ids are known before the first batch
of a step is handed out, and ``forward()`` communicates with nobody.
"""

import collections
import contextlib
import dataclasses

import torch

from .._checks import check_count
from ._place import is_known


@dataclasses.dataclass(frozen=True)
class RowSGD:
    """Changes rows by ``row -= lr * gradient``."""

    lr: float = 0.01

    @property
    def _rule(self):
        return "sgd", [self.lr]


@dataclasses.dataclass(frozen=True)
class RowAdagrad:
    """Adagrad with one accumulator per row, of the mean of its gradient's squares."""

    lr: float = 0.01
    eps: float = 1e-8

    @property
    def _rule(self):
        return "adagrad", [self.lr, self.eps]


@dataclasses.dataclass(frozen=True)
class RowAdam:
    """Adam whose moments change only when the row is touched, as in ``torch.optim.SparseAdam``."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def _rule(self):
        return "adam", [self.lr, *self.betas, self.eps]


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """When rows come into being, and when they are removed."""

    admitted_after: int
    evicted_after: int | None
    evicted_below: float | None

    def check(self):
        """Raises an exception if rows can't live so."""
        for name in ("admitted_after", "evicted_after"):
            count = getattr(self, name)
            if name == "evicted_after" and count is None:
                continue
            check_count(name, count, 1)
            if count >= 1 << 32:
                raise ValueError(f"{name} is {count}; it must be below 2**32")
        norm = self.evicted_below
        if norm is not None and not (isinstance(norm, (int, float)) and 0 <= norm < float("inf")):
            raise ValueError(f"evicted_below is {norm!r}; it must be a number from 0 on")


class Table(torch.nn.Module):
    """A table of rows of ``dim`` numbers. It has no parameters: no worker has all rows.

    ``module.to(device)`` moves what :meth:`forward` returns. The rows of a step are copied there
    once, and their gradients back once for each micro-batch, by way of pinned memory.
    """

    def __init__(self, rows, name, dim, optimizer, bound, lifetime):
        super().__init__()
        self.name = name
        self.dim = dim
        self.bound = float(bound)
        self.rule = optimizer._rule
        self.admitted_after = lifetime.admitted_after
        self.evicted_after = lifetime.evicted_after
        self.evicted_below = lifetime.evicted_below
        self._rows = rows
        self._device = torch.device("cpu")

    def extra_repr(self):
        """Name and dimension."""
        return f"{self.name!r}, dim={self.dim}"

    def _looked_up(self, ids):
        """The positions of ids among the rows that are there, and the rows."""
        rows = self._rows.leaf(self)
        ids = _as_ids(self.name, ids)
        positions = torch.empty_like(ids)
        missing = self._rows.core.find_rows(self._rows.index(self), ids, positions)
        if missing is not None:
            raise KeyError(
                f"id {missing} of table {self.name!r} is not among the ids of this step: the "
                f"function `ids` must return all ids of a batch that forward() uses"
            )
        return _to_device(positions, self._device), rows

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        raise RuntimeError(
            f"table {self.name!r} has no state_dict(): the workers divide its rows, and none has "
            "all. Checkpoints of the job contain them (--checkpoint-dir); the other parameters are "
            "those of named_parameters() and named_buffers()"
        )

    def _load_from_state_dict(self, *arguments):
        raise RuntimeError(
            f"table {self.name!r} loads no state_dict(): its rows come from the group, or from the "
            "job's checkpoint (--resume-from)"
        )

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"table {self.name!r} can't be copied or pickled: its rows belong to the job; call the "
            "module in several places instead"
        )

    def _apply(self, fn, recurse=True):
        moved = fn(torch.empty(0, device=self._device))
        if moved.dtype != torch.float32 or not is_known(moved.device):
            raise ValueError(
                f"rows of table {self.name!r} are torch.float32 on a CPU or a GPU, and can't be "
                f"moved to {moved.dtype} on {moved.device}"
            )
        self._device = moved.device
        return self


class Embedding(Table):
    """As ``torch.nn.Embedding``: the rows of ids, in their shape. From ``job.embedding()``."""

    def forward(self, ids):
        """The rows, of the shape ``[*ids.shape, dim]``."""
        positions, rows = self._looked_up(ids)
        return torch.nn.functional.embedding(positions, rows)


class EmbeddingBag(Table):
    """As ``torch.nn.EmbeddingBag``: sums or means of rows. From ``job.embedding_bag()``."""

    def __init__(self, rows, name, dim, optimizer, bound, lifetime, mode):
        super().__init__(rows, name, dim, optimizer, bound, lifetime)
        self.mode = mode

    def extra_repr(self):
        """Name, dimension and mode."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(self, ids, offsets=None):
        """The sums or means, ``[records, dim]``, of ids ``[records, n]``; or of ids ``[n]``, where
        ``offsets``, ``[records]``, are where the ids of each record begin."""
        positions, rows = self._looked_up(ids)
        if offsets is not None:
            offsets = offsets.to(self._device)
        return torch.nn.functional.embedding_bag(positions, rows, offsets, mode=self.mode)


class Rows:
    """The tables of a job, and the rows that are there now."""

    def __init__(self, worker):
        self._worker = worker
        self._tables = []
        # Whether rows are there, and their gradients are wanted.
        self._is_there = self._is_trained = False
        self._leaves = {}

    @property
    def core(self):
        """The worker's."""
        return self._worker.core

    def declared(self):
        """The tables, in their order."""
        return list(self._tables)

    def index(self, table):
        """Index of a table."""
        return self._tables.index(table)

    # ---- setting up ----

    def add(self, kind, name, dim, optimizer, bound, lifetime, **settings):
        """Adds a table, a module of this kind."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a table is {name!r}; it must be a str")
        if any(table.name == name for table in self._tables):
            raise ValueError(
                f"the job has a table {name!r} already; call its module in several places, or give "
                "this one another name"
            )
        check_count("dim", dim, 1)
        lifetime.check()
        optimizer = RowSGD() if optimizer is None else optimizer
        if not isinstance(optimizer, (RowAdagrad, RowAdam, RowSGD)):
            raise TypeError(
                f"the optimizer of table {name!r} is {optimizer!r}; rows are changed by "
                "RowAdagrad, RowAdam or RowSGD of elasticdl.torch"
            )
        table = kind(self, name, dim, optimizer, bound, lifetime, **settings)
        self._tables.append(table)
        return table

    # ---- ids ----

    def features(self, ids, batch, records):
        """The ids of a batch, as the core takes them. ``ids``: the function of the program."""
        if ids is None:
            raise RuntimeError(
                "the job has tables, and the function that returns the ids of a batch is missing: "
                "pass ids=… to job.evaluator() and job.predictor(), as to job.batches()"
            )
        by_name = ids(batch)
        names = [table.name for table in self._tables]
        if not isinstance(by_name, collections.abc.Mapping) or set(by_name) != set(names):
            found = list(by_name) if isinstance(by_name, collections.abc.Mapping) else by_name
            raise ValueError(
                f"the function `ids` returned {found!r}; it must return a dict with the ids of "
                f"each table, {names}"
            )
        return [
            (index, *_feature(name, value, records))
            for index, name in enumerate(names)
            for value in (by_name[name] if isinstance(by_name[name], list) else [by_name[name]])
        ]

    # ---- rows ----

    @contextlib.contextmanager
    def evaluated(self):
        """The rows of records to evaluate, or to predict for, are there."""
        self._is_there = True
        try:
            yield
        finally:
            self._forget()

    def trained(self):
        """The rows of a step are there."""
        self._is_there = self._is_trained = True

    def leaf(self, table):
        """The rows of a table that are there, ``[ids, dim]``."""
        if not self._is_there:
            raise RuntimeError(
                f"no rows of table {table.name!r} are there: they are looked up for each batch of "
                "`for batch in job.batches(loader, ids=…)`, until its opt.step(), and for the "
                "functions of job.evaluator() and job.predictor()"
            )
        index = self.index(table)
        if index not in self._leaves:
            rows = _on_host((self.core.rows(index), table.dim), torch.float32, table._device)
            self.core.read_rows(index, rows)
            leaf = _to_device(rows, table._device)
            self._leaves[index] = leaf.requires_grad_(self._is_trained)
        return self._leaves[index]

    def deliver(self, weight=None):
        """Hands the gradients of a micro-batch over, whose loss is a mean of so many."""
        if not self._tables:
            return
        if not self._is_trained:
            raise RuntimeError(
                "a job with tables is trained in a loop over job.batches(loader, ids=…), with one "
                "opt.step() for each batch"
            )
        batch = self.core.counted()
        scale = batch.records if weight is None else weight
        for index, leaf in self._leaves.items():
            # A mean of nothing may be NaN.
            if leaf.grad is not None and scale:
                gradient = _to_host(leaf.grad.contiguous())
                self.core.add_row_gradient(index, gradient, scale)
            leaf.grad = None
        if batch.is_last:
            self._forget()

    def _forget(self):
        self._is_there = self._is_trained = False
        self._leaves = {}


class RowBatches:
    """The batches of ``job.batches()``. A loop over them is one over the loader."""

    def __init__(self, worker, rows, loader, ids):
        self._worker, self._rows, self._loader, self._ids = worker, rows, loader, ids

    def __iter__(self):
        return _batches(self._worker, self._rows, self._loader, self._ids)

    def __len__(self):
        return len(self._loader)


def _batches(worker, rows, loader, ids):
    source, announced = iter(loader), []
    while not worker.ended:
        again = collections.deque()
        if announced and worker.core.starts_over():
            # The group has changed before the rows came.
            again, announced = collections.deque(announced), []
        while again or worker.started is None or not worker.core.announced():
            batch = again.popleft() if again else next(source, _END)
            if batch is _END or worker.ended:
                return
            if _announce(worker, rows, ids, batch, len(announced)):
                announced.append(batch)
        worker.core.look_up()
        worker.wait()
        if worker.ended or worker.core.announced() is not None:
            continue
        for batch in announced:
            rows.trained()
            records = worker.drawn[0]
            yield batch
            if worker.drawn and worker.drawn[0] is records:
                raise RuntimeError("each batch of job.batches() needs its own opt.step()")
        announced = []


def _announce(worker, rows, ids, batch, at):
    """Announces the ids of a batch, of which ``at`` others are announced. Returns whether it
    counts."""
    if at >= len(worker.drawn):
        raise RuntimeError(
            "job.batches() got a batch that was not drawn from job.sampler(); the sampler must be "
            "the batch_sampler of the loader"
        )
    counts = worker.core.announce(rows.features(ids, batch, len(worker.drawn[at])))
    if not counts:
        # Its records are drawn again.
        del worker.drawn[at]
    return counts


def _feature(name, value, records):
    """The ids of one value, flat, and where those of each record begin."""
    ids, offsets = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    ids = _as_ids(name, ids)
    if offsets is not None:
        offsets = _as_ids(name, offsets)
        if ids.dim() != 1 or offsets.shape != (records,) or (records and offsets[0] != 0):
            raise ValueError(
                f"the ids of table {name!r} have the shape {list(ids.shape)} and offsets of the "
                f"shape {list(offsets.shape)}; of a micro-batch of {records} records, there is one "
                "offset per record, from 0, and the ids have one dimension"
            )
        return ids, offsets
    if ids.dim() == 0 or ids.shape[0] != records:
        raise ValueError(
            f"the ids of table {name!r} have the shape {list(ids.shape)}; their first dimension "
            f"must be the {records} records of the micro-batch, or a pair of ids and offsets says "
            "where those of each record begin"
        )
    return ids.reshape(-1), torch.arange(records) * (ids.numel() // max(1, records))


def _as_ids(name, ids):
    if not torch.is_tensor(ids) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if torch.is_tensor(ids) else type(ids).__name__
        raise TypeError(
            f"the ids of table {name!r} are {kind}; they must be a tensor of torch.int64 (of a "
            "text, elasticdl.id_of(text) is one)"
        )
    # Waits for a GPU if they are there.
    return ids.detach().cpu().long().contiguous()


def _on_host(shape, dtype, device):
    """Memory of the host, pinned if it is copied to or from a GPU."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def _to_device(tensor, device):
    """A tensor of the host there, copied in the order of the stream."""
    if device.type == "cpu":
        return tensor
    if not tensor.is_pinned():
        tensor = _on_host(tensor.shape, tensor.dtype, device).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def _to_host(tensor):
    """A tensor on the host, once the stream has computed it."""
    if tensor.device.type == "cpu":
        return tensor
    return _on_host(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


_END = object()
