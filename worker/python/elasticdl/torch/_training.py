"""What trains the module of a job: the flat memory, and the steps of its optimizers."""

import contextlib
import math

import torch

from .._worker import Calls
from ._chunks import Chunks, refuse_whole
from ._gradients import UNUSED, WEIGHT, Gradients
from ._inference import set_buffers
from ._module import tensor_of, tensors_of
from ._new_state import first_step
from ._place import at_address, place_of
from ._scaler import overflows
from ._schedules import Schedules
from ._settings import Settings
from ._state import State
from ._together import Together
from ._unchanged import Unchanged


class Training:
    """The training of a module, by one optimizer or several, which change it in the same steps."""

    def __init__(self, job, reduction):
        self._job = job
        self._worker = job._worker
        self._reduction = reduction
        # The program's optimizers with the maximum norms of their gradients, and those in their
        # place.
        self._clipped = []
        self._optimizers = []
        self._overlap, self._unfreezes = True, False
        # Gradients that were taken by optimizers while others have not stepped yet.
        self._kept = {}
        self._gradients = None
        self._is_applying = False
        # The optimizer's state, if it is divided over the workers.
        self._chunks = None

    def check_whole(self, what):
        """Refuses what needs the whole state of the optimizer, where no worker has it."""
        if self._chunks is not None:
            refuse_whole(what)

    def add(self, optimizer, inner, *, reduction, clip_norm, overlap, unfreezes):
        """Adds an optimizer of the program, and the one in its place."""
        if reduction != self._reduction:
            raise ValueError(
                f"reduction is {reduction!r} and was {self._reduction!r} for another optimizer; "
                "the loss of a micro-batch is a mean or a sum for all of them"
            )
        own = {id(p) for group in inner.param_groups for p in group["params"]}
        for before, _ in self._clipped:
            if any(id(p) in own for group in before.param_groups for p in group["params"]):
                raise ValueError("a parameter is in two optimizers; each is changed by one of them")
        self._clipped.append((inner, clip_norm))
        self._optimizers.append(optimizer)
        self._overlap = overlap and len(self._optimizers) == 1
        self._unfreezes = self._unfreezes or unfreezes

    def step(self, optimizer, loss, weight):
        """One of the optimizers steps; see ``Optimizer.step()``."""
        if callable(loss):
            raise TypeError("step() takes the loss; closures, as of LBFGS, are not supported")
        if not self._worker.drawn:
            raise RuntimeError("there is no micro-batch to deliver: draw one from the sampler")
        if weight is not None:
            weight = self._checked(weight)
            if len(self._optimizers) > 1:
                raise ValueError(_NO_WEIGHT)
        if not self._have_all_stepped(optimizer):
            return False
        self._unchanged.check()
        told = self._schedules.begin_step() + self._job._meeting.tell()
        for name, value in [(self._settings.tell(), 1), *told]:
            self._worker.core.add(name, value)
        with self._place.on_stream():
            delivered = self._deliver(0.0 if loss is None else loss, weight)
        self._schedules.end_step(delivered.committed)
        self._settings.end_step(delivered)
        return delivered.committed

    def _have_all_stepped(self, optimizer):
        """An optimizer takes its gradients. Whether all have, for this micro-batch."""
        if len(self._optimizers) == 1:
            return True
        if optimizer in self._kept:
            self._kept.clear()
            raise RuntimeError(_TWICE)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._kept[optimizer] = [(parameter, parameter.grad) for parameter in own]
        # What further backward passes add is not for this optimizer, as in a plain loop.
        for parameter in own:
            parameter.grad = None
        if len(self._kept) < len(self._optimizers):
            return False
        self._gradients.clear()
        for parameter, gradient in (pair for pairs in self._kept.values() for pair in pairs):
            parameter.grad = gradient
        self._kept.clear()
        return True

    def _deliver(self, loss, weight):
        now = change = self._flat_buffers()
        if self._buffers:
            before = self._values[: self._buffer_len]
            # A buffer may have infinite elements, such as a mask; they stay as they are.
            change = torch.where(now == before, 0.0, now - before)
        if self._worker.core.options.is_deterministic and change.any():
            raise RuntimeError(_NO_MEANS)
        self._job._rows.deliver(weight)
        value = self._gradients.deliver(change, loss, weight)
        batch = self._worker.core.counted()
        if batch.address:
            self._accepted = now
        if batch.is_again and batch.is_last:
            self._end_again()
        elif not batch.address and self._buffers:
            # The micro-batch does not count, so neither does what it did to the buffers.
            set_buffers(self._buffers, self._accepted)
        delivered = self._worker.deliver(value, self._reduction)
        self._is_prefetching = self._is_prefetching or len(self._worker.drawn) > 0
        self._has_delivered = True
        return delivered

    def _before_compared(self, batch):
        """A micro-batch is computed next whose gradient is compared with that of another worker,
        with the buffers of the last commit and what its own part has done to them."""
        if batch.is_again and not batch.before:
            if self._set_aside is None:
                self._set_aside = self._accepted, self._gradients.overflows.clone()
            self._load_buffers()

    def _end_again(self):
        """What was computed again leaves nothing behind."""
        (self._accepted, overflows), self._set_aside = self._set_aside, None
        self._gradients.overflows.copy_(overflows)
        if self._buffers:
            set_buffers(self._buffers, self._accepted)

    @staticmethod
    def _checked(weight):
        weight = float(weight)
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight is {weight}; it must be finite, and at least 0")
        return weight

    def _before_draw(self):
        """The loop asks for a micro-batch, and has called step() for those that it has computed."""
        drawn = self._worker.drawn
        if not drawn:
            self._is_outside = self._gradients.has_any()
        elif self._gradients.has_any() and not self._is_outside:
            raise RuntimeError(_ACCUMULATED)
        elif self._has_delivered and not self._is_prefetching and not self._job._rows.declared():
            raise RuntimeError(_NO_STEP)
        self._schedules.drawn()

    def _check_caller(self, optimizer, arguments, options):
        """Called before each step of the program's optimizer."""
        del optimizer, arguments, options
        if not self._is_applying:
            raise RuntimeError(
                "step() of the program's own optimizer would change the parameters of this worker "
                "alone; call step() of the one that job.optimizer() has returned"
            )

    # ---- the flat memory ----

    def begin(self):
        """Starts the trainer."""
        job = self._job
        self._inner = self._clipped[0][0]
        if len(self._clipped) > 1:
            if job._scaler is not None or job._rows.declared():
                raise ValueError(_ONE_OPTIMIZER)
            self._inner = Together([inner for inner, _ in self._clipped])
        options = self._worker.core.options
        if options.shards_optimizer:
            if len(self._clipped) > 1 or job._scaler is not None or job._rows.declared():
                raise ValueError(_ONE_SHARDED)
            self._chunks = Chunks(self._inner, self._unfreezes)
        # The sum is the same however it is divided, and so is its norm.
        is_exact = options.is_deterministic or options.shards_optimizer
        clip_norm = self._clipped[0][1] if len(self._clipped) == 1 else None
        self._clip_norm = clip_norm if is_exact else None
        self._bucket_len = _BUCKET_LEN if self._overlap else None
        _check_owner(job._net, self._inner)
        tables = job._rows.declared()
        if tables and (self._reduction != "mean" or job._scaler is not None):
            raise ValueError(_PLAIN_ROWS)
        trainable, frozen, self._buffers = tensors_of(job._net)
        own = {id(p) for group in self._inner.param_groups for p in group["params"]}
        later = [entry for entry in frozen if self._unfreezes and id(entry[1]) in own]
        self._trainable = later + trainable
        self._frozen = [entry for entry in frozen if all(entry is not each for each in later)]
        buffers = [(entry[0], tensor_of(entry)) for entry in self._buffers]
        order = buffers + self._frozen + self._trainable
        tensors = [(name, list(tensor.shape)) for name, tensor in order]
        total = sum(tensor.numel() for _, tensor in order)
        self._buffer_len = sum(tensor.numel() for _, tensor in buffers)
        self._place = place_of(job._net)
        with self._place.on_stream():
            self._start(tensors, total, tables)
        # The loop may go on in another thread, with another stream.
        self._place.synchronize()

    def _start(self, tensors, total, tables):
        job = self._job
        # Those of a loop that has changed nothing but what it may.
        self._has_delivered = self._is_prefetching = self._is_outside = False
        # While a gradient is computed again: what the micro-batches before have changed.
        self._set_aside = None
        self._schedules = Schedules(
            self._worker,
            [*self._optimizers, *(inner for inner, _ in self._clipped)],
            job._objects,
            lambda: self._settings.noting(),
        )
        objects = {**job._objects.by_name, **self._schedules.objects()}
        division, of_whole, groups = None, self._inner, self._inner.param_groups
        first = total - sum(parameter.numel() for _, parameter in self._trainable)
        if self._chunks is not None:
            division, of_whole = (first, self._chunks.slots), self._chunks.twin
            self._chunks.lay_out(first, [parameter for _, parameter in self._trainable])
        names = self._names()
        self._state = State(of_whole, objects, self._place, names, self._unfreezes, groups)
        self._place.allocate(total, self._state.floats, is_divided=division is not None)
        calls = Calls(
            initialize=self._initialize,
            update=self._update,
            gathered=self._gathered,
            load=self._load,
        )
        self._worker.context = self._acting
        self._worker.start(
            tensors,
            self._state.floats,
            calls,
            is_direct=True,
            division=division,
            parts=self._parts(division, total),
            clipped_from=None if self._clip_norm is None else first,
            bucket_len=self._bucket_len,
            on_gpu=self._place.on_gpu,
            tables=tables,
            settings=self._state.settings(),
        )
        self._values, state = self._place.bind(self._worker.started)
        self._state.bind(state)
        self._bind()
        self._unchanged = Unchanged(
            job._net,
            self._frozen,
            self._trainable,
            self._values,
            self._buffer_len,
            is_on_gpu=self._place.on_gpu is not None,
        )
        self._settings = Settings(self._inner, self._worker)
        self._worker.before_draw = self._before_draw
        self._worker.before_compared = self._before_compared
        for inner, _ in self._clipped:
            inner.register_step_pre_hook(self._check_caller)

    def _parts(self, division, total):
        """What lies where in the state, for checkpoints."""
        own = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        start, place = 0, lambda index, name: None
        if division is not None:
            first, slots = division
            start = slots * (total - first)
            place = lambda index, name: self._chunks.place(own[index], name)
        return self._state.parts(start, place)

    def _names(self):
        """The index in the module and the name of each parameter, in the optimizer's order."""
        named = enumerate(self._job._net.named_parameters())
        places = {parameter: (at, name) for at, (name, parameter) in named}
        groups = self._inner.param_groups
        return [places[parameter] for group in groups for parameter in group["params"]]

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
            self._worker.core,
            self._place,
            parameters,
            start,
            is_mean=is_mean,
            bucket_len=self._bucket_len,
            scaler=self._job._scaler,
        )
        if self._chunks is not None:
            updated = self._place.updated(self._worker.started, self._values)
            self._chunks.bind(updated, self._buffer_len)
            return
        # The gradient of a step, for the optimizer.
        self._mean = torch.empty(at - start, device=self._place.device)
        sizes = [parameter.numel() for parameter in parameters]
        parts = zip(parameters, self._mean.split(sizes), strict=True)
        self._views = [(parameter, part.view(parameter.shape)) for parameter, part in parts]

    def _flat_buffers(self):
        buffers = [tensor_of(entry) for entry in self._buffers]
        parts = [buffer.detach().reshape(-1).float() for buffer in buffers]
        flat = torch.cat(parts) if parts else torch.empty(0, device=self._place.device)
        if len(flat) != self._buffer_len:
            raise RuntimeError(
                f"the module's buffers have {len(flat)} elements, and had {self._buffer_len} when "
                "training began; a buffer keeps its shape"
            )
        return flat

    # ---- what the trainer asks for ----

    @contextlib.contextmanager
    def _acting(self):
        with self._place.on_stream():
            yield
            # An evaluator may have changed parameters, and back.
            self._unchanged.note_versions()
            if self._worker.ended:
                self._place.synchronize()

    def _initialize(self, seed, address):
        """The parameters are in the flat memory since the beginning; those on a GPU are copied to
        the host."""
        del seed
        before = self._inner if self._chunks is None else self._chunks.twin
        if before.state:
            # It was loaded before training, or made with the optimizer.
            self._state.save()
        if self._place.on_gpu is not None:
            at_address(address, len(self._values)).copy_(self._values)

    def _load(self, trains):
        if trains:
            # The loop may read settings before the first step.
            self._state.load()
        self._load_buffers()
        self._unchanged.note()
        self._settings.note()
        # As after the start: the parameters are new.
        self._place.synchronize()

    def _load_buffers(self):
        if self._buffers:
            self._accepted = self._values[: self._buffer_len].clone()
            set_buffers(self._buffers, self._accepted)

    @torch.no_grad()
    def _update(self, step, records, loads, address):
        if loads:
            self._state.load()
            self._settings.note()
        objects = self._job._objects
        tally = self._worker.started.progress.tally
        self._settings.begin_commit()
        with torch.enable_grad():
            with self._schedules.called_by("functions"):
                objects.begin_step(self._job.epoch)
            self._schedules.begin_commit(self._job.epoch, tally)
        self._settings.decide(tally)
        self._job._meeting.commit(tally)
        if self._chunks is not None:
            # Frees the gradients of the last micro-batch.
            self._gradients.means(address)
            self._step_chunks(records, tally)
            self._state.is_open = True
            self._state.save()
            return
        # The sum stays as it is: other workers may still need it.
        sums = self._gradients.flat(address)
        # The sum of a strict job is rounded.
        is_strict = self._worker.core.options.is_deterministic
        means = None if is_strict else self._gradients.means(address)
        scaler = self._job._scaler
        left_out = scaler is not None and overflows(sums)
        if left_out:
            self._load_buffers()
        else:
            self._apply(sums, records, means, tally)
        if scaler is not None:
            scaler._commit(left_out)
        self._end_update()

    def _end_update(self):
        with torch.enable_grad():
            with self._schedules.called_by("functions"):
                self._job._objects.commit()
            self._schedules.commit()
        if self._chunks is not None:
            name = self._unchanged.changed()
            if name is not None:
                raise RuntimeError(_CHANGED_AFTER.format(name))
        self._state.save()
        self._unchanged.note()
        self._settings.note()
        self._gradients.clear()

    @torch.no_grad()
    def _gathered(self, loads):
        """The parameters are those of the step, on all workers."""
        if loads:
            self._state.load()
            self._settings.note()
        if self._state.is_open or loads:
            self._load_buffers()
            self._unchanged.note()
        if self._state.is_open:
            self._state.is_open = False
            self._end_update()

    def _step_chunks(self, records, tally):
        """Updates the chunks of this worker."""
        divisor, norm = self._divisor(records, tally), self._worker.core.norm()
        self._chunks.step(
            self._worker.core.chunks(),
            records,
            divisor,
            None if norm is None else self._clip_factor(norm / divisor),
            lambda at: tally.get(UNUSED.format(at), 0) == records,
        )

    def _divisor(self, records, tally):
        """What the sum of the gradients is divided by."""
        weight = tally.get(WEIGHT)
        if weight == 0:
            raise ValueError(
                "the weights of all micro-batches of the step are 0, so its gradient is no mean; "
                "leave out records without anything to learn"
            )
        return weight or (records if self._reduction == "mean" else 1)

    def _clip_factor(self, norm):
        """The factor of a mean gradient of this norm, as of ``clip_grad_norm_``."""
        return min(self._clip_norm / (norm + 1e-6), 1.0)

    def _apply(self, sums, records, means, tally):
        divisor, norm = self._divisor(records, tally), self._worker.core.norm()
        if means is None:
            torch.div(sums[-len(self._mean) :], divisor, out=self._mean)
            if norm is not None:
                self._mean.mul_(self._clip_factor(norm / divisor))
            means = [view for _, view in self._views]
        if self._buffers:
            self._values[: self._buffer_len] += sums[: self._buffer_len] / records
            self._load_buffers()
        for at, ((parameter, _), mean) in enumerate(zip(self._views, means, strict=True)):
            # As in a plain loop: the optimizer leaves it as it is.
            is_unused = tally.get(UNUSED.format(at), 0) == records
            parameter.grad = None if is_unused else mean
        for inner, clip_norm in self._clipped:
            parameters = [p for group in inner.param_groups for p in group["params"]]
            if len(self._clipped) == 1:
                # As in a plain loop, also those that the optimizer lacks.
                parameters = [parameter for parameter, _ in self._views]
            if clip_norm is not None and norm is None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        self._is_applying = True
        with torch.enable_grad():
            if self._state.is_unmade():
                first_step(self._inner, self._state.move)
            else:
                self._inner.step()
        self._is_applying = False


def _check_owner(net, optimizer):
    known = {id(parameter) for parameter in net.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    "the optimizer has a parameter that the module of job.model() does not have; "
                    "declare one module that contains all parameters"
                )


_NO_MEANS = (
    "--deterministic: the module changes a buffer, as BatchNorm does, and the mean over the "
    "workers depends on their number; use a module without, such as GroupNorm"
)
_PLAIN_ROWS = (
    "the gradient of a row is a mean over the step's records, or by weight, without a scale: a job "
    "with tables takes reduction='mean' and no job.scaler()"
)
_TWICE = (
    "an optimizer stepped twice in one micro-batch, or another one has not stepped. A job's "
    "optimizers all step once for each micro-batch, and change their parameters in the same step. "
    "Where a micro-batch is for one of them alone, call step() of the others, too: parameters "
    "without a gradient stay as they are"
)
_NO_WEIGHT = "step() takes a weight in a job of one optimizer, and this one has several"
_CHANGED_AFTER = (
    "with --shard-optimizer a function on_commit of job.state() can't change parameters, as some "
    "workers may have called it, and others not, when a worker is lost; it changed {}. Train "
    "without --shard-optimizer, or let the loss keep parameters in their range"
)
_ONE_SHARDED = (
    "a job with --shard-optimizer has one optimizer, and neither tables nor job.scaler(); start "
    "it without --shard-optimizer, or put the parameters into groups of one optimizer"
)
_ONE_OPTIMIZER = "a job with tables or with job.scaler() has one optimizer"
_ACCUMULATED = (
    "a micro-batch was drawn after a backward() that no opt.step() has followed. Each micro-batch "
    "has its own opt.step(loss), which accumulates: it changes the parameters when all records of "
    "the step are there, as many as --global-batch-size (without a master global_batch of "
    "job.sampler()), and their gradient is the mean over them. So call opt.step() after each "
    "backward(), and do not divide the loss by the number of micro-batches"
)
_NO_STEP = (
    "a micro-batch was drawn, and the one before has had no opt.step(). Each micro-batch needs its "
    "own; to leave a batch out, multiply its loss by 0"
)
# Number of elements of a bucket: 4 MiB.
_BUCKET_LEN = 1 << 20
