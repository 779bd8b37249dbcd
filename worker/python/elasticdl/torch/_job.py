"""Jobs of PyTorch models."""

import torch

from .. import _elasticdl, _job
from .._inference import Evaluator, Predictor
from ._gradients import Gradients
from ._inference import Applied, caller, set_buffers
from ._place import at_address, is_known, place_of
from ._random import number_modules
from ._scaler import Scaler, overflows
from ._state import State


def join():
    """Joins the job that launched this process, and returns a :class:`Job`.

    Without a launcher, the job is a group of one. A process joins once.
    """
    return _job._join(Job)


class Job(_job.Job):
    """A job that trains one ``torch.nn.Module``, on the CPU or on a GPU."""

    def __init__(self, core):
        super().__init__(core)
        self._net = None
        self._optimizer = None
        self._objects = {}
        self._hooks = []
        self._scaler = None

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
        makes another stream the current one of this thread, on which all work with the module is to
        be enqueued; at its end, PyTorch's allocator holds the parameters and two gradients beside
        the optimizer's state. A buffer becomes, with each step,
        the mean over all workers, weighted by their records.
        """
        self._not_begun("model()")
        if not isinstance(net, torch.nn.Module):
            raise TypeError(f"job.model() takes a torch.nn.Module, not {type(net).__name__}")
        _check_module(net)
        number_modules(net)
        self._net = net
        return net

    def optimizer(self, optimizer, *, reduction="mean", clip_norm=None, overlap=True):
        """Declares the optimizer, and returns the :class:`Optimizer` to use in its place.

        ``reduction``: whether the loss is a mean or a sum over a micro-batch's records. With
        "mean", a step's gradient is the mean over all its records. ``clip_norm``: maximum norm of
        the step's gradient, as ``torch.nn.utils.clip_grad_norm_`` clips it. ``overlap``: whether
        the backward pass of a step's last micro-batch hands its gradients over as it computes
        them, so that they are summed meanwhile. Each micro-batch then has one backward pass, and
        its gradients are not changed afterwards.
        """
        self._not_begun("optimizer()")
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"job.optimizer() takes a torch.optim.Optimizer, not {kind}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm is {clip_norm}; it must be above 0")
        if overlap not in (False, True):
            raise TypeError(f"overlap is {overlap!r}; it must be a bool")
        self._optimizer = Optimizer(self, optimizer, reduction, clip_norm, overlap)
        return self._optimizer

    def scaler(self, scaler):
        """Returns the :class:`Scaler` to use in place of a ``torch.amp.GradScaler``.

        ``scaler.step(opt, loss)`` calls ``opt.step(loss)``. The scale is a part of the group's
        state.
        """
        self._not_begun("scaler()")
        if not isinstance(scaler, torch.amp.GradScaler):
            kind = type(scaler).__name__
            raise TypeError(f"job.scaler() takes a torch.amp.GradScaler, not {kind}")
        mine = Scaler(scaler)
        self.state("the scaler", mine)
        self._scaler = mine if mine.is_enabled() else None
        return mine

    def evaluator(self, dataset, function=None, *, micro_batch=64, collate=None):
        """Says how the module is evaluated, on a map-style data set.

        ``function`` gets a micro-batch of at most ``micro_batch`` elements, as a ``DataLoader``
        gives it to its loop: ``function(x, y)`` for a data set of pairs. It returns metrics by
        name: each the mean over the micro-batch, or a tensor with one value per record. It is
        called with ``elasticdl evaluate``, and in training with ``--validation-data``, in
        evaluation mode and without gradients; the results are means over all records. ``collate``:
        makes a micro-batch of a list of elements. Default: as a ``DataLoader`` does. Without
        ``function``, returns a decorator for it.
        """
        evaluator = Evaluator(len(dataset), micro_batch, caller(self, dataset, collate))
        return self._declare("evaluator", evaluator, function)

    def predictor(self, dataset, function=None, *, micro_batch=64, collate=None):
        """Says how the module makes predictions, for a map-style data set.

        ``function`` returns columns by name: tensors of one dimension, or lists of numbers or text,
        with one element per record. It is called with ``elasticdl predict``, which writes them.
        Otherwise as :meth:`evaluator`.
        """
        predictor = Predictor(len(dataset), micro_batch, caller(self, dataset, collate))
        return self._declare("predictor", predictor, function)

    def generator(self, *, record=None, step=None, epoch=None, stream=0, device="cpu"):
        """Returns a ``torch.Generator`` that belongs to a record or a step; see ``seed_for()``."""
        seed = self.seed_for(record=record, step=step, epoch=epoch, stream=stream)
        return torch.Generator(device).manual_seed(seed)

    def state(self, name, value, on_commit=None):
        """Adds an object with ``state_dict()`` and ``load_state_dict()`` to the group's state.

        Workers that join receive it. It may change in ``on_commit`` alone, which is called after
        each committed step on every worker: ``job.state("scheduler", s, on_commit=s.step)``.
        """
        self._not_begun("state()")
        if isinstance(value, torch.amp.GradScaler):
            raise TypeError(f"job.state({name!r}): {_NO_SCALER}")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise TypeError(f"job.state({name!r}): {type(value).__name__} has no {method}()")
        if name in self._objects:
            raise ValueError(f"job.state({name!r}): there is one of this name already")
        self._objects[name] = value
        if on_commit is not None:
            self._hooks.append(on_commit)

    def commit(self, loss=0.0, *, reduction="mean"):
        """Not for PyTorch models; use ``step()`` of the optimizer."""
        raise TypeError("a PyTorch model is trained by opt.step(), not by job.commit()")

    def _begin(self):
        if self._memory is not None:
            return
        if self._net is None:
            raise RuntimeError("call job.model() before the first micro-batch is drawn")
        if self.work != "train":
            trainable, frozen, buffers = _tensors(self._net)
            Applied(self, buffers + frozen + trainable, buffers).begin()
            return
        if self._optimizer is None:
            raise RuntimeError("call job.optimizer() before the first micro-batch is drawn")
        self._optimizer._begin()


class Optimizer:
    """Takes the place of a ``torch.optim.Optimizer`` in a training loop."""

    def __init__(self, job, inner, reduction, clip_norm, overlap):
        self._job = job
        self._inner = inner
        self._reduction = reduction
        self._clip_norm = clip_norm
        self._bucket_len = _BUCKET_LEN if overlap else None
        self._gradients = None

    @property
    def _step_supports_amp_scaling(self):
        # GradScaler.step() asks for it. It would unscale the gradient, and leave the step out if
        # the gradient of this worker alone overflows.
        raise TypeError(_NO_SCALER)

    @property
    def param_groups(self):
        """Those of the optimizer."""
        return self._inner.param_groups

    def state_dict(self):
        """That of the optimizer."""
        return self._inner.state_dict()

    def zero_grad(self, set_to_none=True):
        """Clears gradients. ``step()`` has cleared those that it has taken."""
        self._inner.zero_grad(set_to_none)

    def step(self, loss=None):
        """Delivers the gradient of one micro-batch.

        Call it once for each micro-batch. It changes nothing until all records of the step are
        there; then it sums the gradients of all workers, updates the parameters and commits the
        records with them. Returns whether it did. ``loss``: the micro-batch's, to be reported.
        """
        if callable(loss):
            raise TypeError("step() takes the loss; closures, as of LBFGS, are not supported")
        job = self._job
        if not job._drawn:
            raise RuntimeError("there is no micro-batch to deliver: draw one from the sampler")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when training began and requires a gradient now; "
                    "freeze no parameter that is trained later"
                )
        now = self._flat_buffers()
        change = now - self._values[: self._buffer_len]
        if job._core.options.is_deterministic and change.any():
            raise RuntimeError(_NO_MEANS)
        value = self._gradients.deliver(change, 0.0 if loss is None else loss)
        before, self._accepted = self._accepted, now
        counts, committed = job._commit(value, self._reduction)
        if not counts and self._buffers:
            # The micro-batch does not count, so neither does what it did to the buffers.
            self._accepted = before
            set_buffers(self._buffers, before)
        return committed

    # ---- the flat memory ----

    def _begin(self):
        job = self._job
        _check_owner(job._net, self._inner)
        self._trainable, self._frozen, self._buffers = _tensors(job._net)
        order = self._buffers + self._frozen + self._trainable
        tensors = [(name, list(tensor.shape)) for name, tensor in order]
        total = sum(tensor.numel() for _, tensor in order)
        self._buffer_len = sum(tensor.numel() for _, tensor in self._buffers)
        self._place = place_of(job._net)
        self._state = State(self._inner, job._objects, self._place)
        slots = -(-self._state.floats // total)
        self._place.allocate(total, slots)
        job._launch(
            tensors,
            slots,
            (self._initialize, self._update, self._load_buffers),
            is_direct=True,
            bucket_len=self._bucket_len,
            on_gpu=self._place.on_gpu,
        )
        self._values, state = self._place.bind(job._memory)
        self._state.bind(state)
        self._bind()

    def _bind(self):
        """Moves the parameters of the module to the flat memory."""
        self._accepted = self._flat_buffers()
        self._values[: self._buffer_len] = self._accepted
        at = self._buffer_len
        with torch.no_grad():
            for _, parameter in self._frozen + self._trainable:
                value = self._values[at : at + parameter.numel()].view(parameter.shape)
                value.copy_(parameter)
                parameter.data = value
                parameter.grad = None
                at += parameter.numel()
        parameters = [parameter for _, parameter in self._trainable]
        start = at - sum(parameter.numel() for parameter in parameters)
        is_mean = self._reduction == "mean"
        self._gradients = Gradients(
            self._job._core,
            self._place,
            parameters,
            start,
            is_mean=is_mean,
            bucket_len=self._bucket_len,
            scaler=self._job._scaler,
        )
        # The gradient of a step, for the optimizer.
        self._mean = torch.empty(at - start, device=self._place.device)
        sizes = [parameter.numel() for parameter in parameters]
        parts = zip(parameters, self._mean.split(sizes), strict=True)
        self._views = [(parameter, part.view(parameter.shape)) for parameter, part in parts]

    def _flat_buffers(self):
        parts = [buffer.detach().reshape(-1).float() for _, buffer in self._buffers]
        return torch.cat(parts) if parts else torch.empty(0, device=self._place.device)

    # ---- what the trainer asks for ----

    def _initialize(self, seed, address):
        """The parameters are in the flat memory since the beginning; those on a GPU are copied to
        the host."""
        del seed
        if self._place.on_gpu is not None:
            at_address(address, len(self._values)).copy_(self._values)

    def _load_buffers(self):
        if self._buffers:
            self._accepted = self._values[: self._buffer_len].clone()
            set_buffers(self._buffers, self._accepted)

    @torch.no_grad()
    def _update(self, step, records, loads, address):
        if loads:
            self._state.load()
        # The sum stays as it is: other workers may still need it.
        sums = self._gradients.flat(address)
        # The sum of a strict job is rounded.
        is_strict = self._job._core.options.is_deterministic
        means = None if is_strict else self._gradients.means(address)
        scaler = self._job._scaler
        left_out = scaler is not None and overflows(sums)
        if left_out:
            self._load_buffers()
        else:
            self._apply(sums, records, means)
        if scaler is not None:
            scaler.commit(left_out)
        with torch.enable_grad():
            for hook in self._job._hooks:
                hook()
        self._state.save()
        self._gradients.clear()

    def _apply(self, sums, records, means):
        if means is None:
            divisor = records if self._reduction == "mean" else 1
            torch.div(sums[-len(self._mean) :], divisor, out=self._mean)
            means = [view for _, view in self._views]
        if self._buffers:
            self._values[: self._buffer_len] += sums[: self._buffer_len] / records
            self._load_buffers()
        for (parameter, _), mean in zip(self._views, means, strict=True):
            parameter.grad = mean
        if self._clip_norm is not None:
            parameters = [parameter for parameter, _ in self._views]
            torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        with torch.enable_grad():
            self._inner.step()


def _check_owner(net, optimizer):
    known = {id(parameter) for parameter in net.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    "the optimizer has a parameter that the module of job.model() does not have; "
                    "declare one module that contains all parameters"
                )


def _tensors(net):
    """Trained parameters, other parameters and buffers of a module, with their names."""
    named = list(net.named_parameters())
    trainable = [entry for entry in named if entry[1].requires_grad]
    frozen = [entry for entry in named if not entry[1].requires_grad]
    if not trainable:
        raise ValueError("the module has no parameter that requires a gradient")
    _check_module(net)
    return trainable, frozen, [entry for entry in net.named_buffers() if entry[1].numel()]


def _check_module(net):
    for name, parameter in net.named_parameters():
        if parameter.dtype != torch.float32 or not is_known(parameter.device):
            raise ValueError(
                f"{name} is {parameter.dtype} on {parameter.device}; parameters must be "
                "torch.float32 on the CPU or on a CUDA device"
            )
    devices = {value.device for value in (*net.parameters(), *net.buffers())}
    if len(devices) > 1:
        raise ValueError(
            f"the module is on several devices, {', '.join(sorted(map(str, devices)))}; move it to "
            "one, such as job.device"
        )
    for name, buffer in net.named_buffers():
        if buffer.is_complex():
            raise ValueError(f"the buffer {name} must be of real numbers")
        exact = buffer.numel() == 0 or bool((buffer.float().to(buffer.dtype) == buffer).all())
        if not buffer.is_floating_point() and not exact:
            raise ValueError(f"the buffer {name} has integers that f32 can't represent")


_NO_MEANS = (
    "--deterministic: the module changes a buffer, as BatchNorm does, and the mean over the "
    "workers depends on their number; use a module without, such as GroupNorm"
)
_NO_SCALER = (
    "a GradScaler changes its scale with each micro-batch of one worker, and all workers must take "
    "the same step; use the one that job.scaler(scaler) returns"
)


# Number of elements of a bucket: 4 MiB.
_BUCKET_LEN = 1 << 20
