"""The way of gradients from a backward pass to the trainer.

The trainer's gradient of a step is one flat array, to which each micro-batch adds::

    buffers | frozen parameters | parameters, in the order of the module
                                                  <-- bucket 1 --><-- bucket 0 -->

``step()`` moves the gradients of a micro-batch here, all at once. In the last one of a step, if
there are other workers, a hook moves each as soon as the backward pass, which visits the parameters
from the last to the first, has accumulated it. The elements behind the first parameter that is
still missing are declared complete, and the trainer sums whole buckets of them over all workers
while the backward pass continues.
"""

import collections
import functools

import torch

from ._scaler import OVERFLOW


class Gradients:
    """Moves gradients of the parameters to the trainer. One micro-batch after the other."""

    def __init__(self, core, place, parameters, start, *, is_mean, bucket_len, scaler=None):
        """``start``: offset of the first parameter. ``bucket_len``: ``None`` without overlap."""
        self._core = core
        self._place = place
        self._parameters = parameters
        self._starts = [start]
        for parameter in parameters:
            self._starts.append(self._starts[-1] + parameter.numel())
        self._is_mean = is_mean
        self._scaler = scaler
        self._bucket_len = bucket_len
        # Whether micro-batches have weights, once one was delivered.
        self._has_weights = None
        self._flats = collections.OrderedDict()
        for address, flat in place.flats().items():
            self._flats[address] = self._viewed(flat)
        self._own = None
        # Whether a gradient of the step was not finite.
        self.overflows = torch.zeros((), dtype=torch.bool, device=place.device)
        # Sum of the loss over the micro-batches of the step that are on the GPU.
        self._loss_sum = 0.0
        # Indices of those without a hook.
        self._unhooked = range(len(parameters)) if bucket_len is not None else []
        self._hook()
        self._forget()

    @property
    def total(self):
        """Number of elements of the flat array."""
        return self._starts[-1]

    def flat(self, address):
        """The flat array of the trainer at an address; it must not be used after its call."""
        return self._at(address)[0]

    def means(self, address):
        """The gradients of the parameters if those of one micro-batch are all of a step's: if the
        sum at this address is the array that it was moved to, since only a worker that trains
        alone uses it as the sum. Otherwise None. They are given once."""
        own, self._own = self._own, None
        return own[1] if own is not None and own[0] == address else None

    def has_any(self):
        """Whether a parameter has a gradient that is not delivered."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def deliver(self, buffers, loss, weight=None):
        """Completes the gradient of the micro-batch. ``buffers``: the first elements' part.
        ``weight``: of the micro-batch, in the place of its number of records. Returns the loss to
        report."""
        batch = self._begin()
        if self._has_weights not in (None, weight is not None):
            raise RuntimeError(_SOME_WEIGHTS)
        # The first micro-batch was taken before its weight was known.
        is_late = weight is not None and self._has_weights is None and self._is_mean
        self._has_weights = weight is not None
        if weight is not None:
            self._core.add(WEIGHT, weight)
        own = []
        with torch.no_grad():
            left = []
            for index, parameter in enumerate(self._parameters):
                taken, gradient = self._taken[index], parameter.grad
                if taken is not None:
                    if gradient is not taken[0] or gradient._version != taken[1]:
                        raise RuntimeError(_CHANGED)
                if weight == 0 and self._is_mean:
                    # A mean of nothing may be NaN.
                    gradient = None
                if gradient is None and batch.address:
                    self._core.add(UNUSED.format(index), batch.records)
                is_moved = taken is not None and batch.is_overlapped and not is_late
                if gradient is not None and batch.address and not is_moved:
                    left.append((index, gradient))
                elif gradient is None and batch.address and not batch.before:
                    self._at(batch.address)[1][index].zero_()
                own.append(gradient)
                parameter.grad = None
            self._move(batch, left, weight)
            if batch.address and (self._starts[0] or self._scaler is not None):
                flat = self.flat(batch.address)
                if not batch.before:
                    flat[: self._starts[0]] = 0.0
                # The values of the last micro-batch, for all records of this worker.
                torch.mul(buffers, batch.before + batch.records, out=flat[: len(buffers)])
                if self._scaler is not None:
                    flat[0] = torch.where(self.overflows, OVERFLOW, flat[0])
        is_plain = self._is_mean and self._scaler is None and batch.address and not batch.before
        if is_plain and all(gradient is not None and not gradient.is_sparse for gradient in own):
            self._own = batch.address, own
        loss = self._reported(batch, loss)
        self._hook()
        self._forget()
        return loss

    def _reported(self, batch, loss):
        """The loss to report with a micro-batch. That of a GPU is read once per step: to read it is
        to wait for the GPU."""
        if not torch.is_tensor(loss):
            return float(loss)
        if loss.device.type == "cpu":
            return float(loss.detach())
        if not batch.address:
            return 0.0
        self._loss_sum = self._loss_sum + loss.detach().double() * batch.records
        if not batch.is_last:
            return 0.0
        total, self._loss_sum = self._loss_sum, 0.0
        return float(total) / batch.records

    def clear(self):
        """Forgets the gradients of a backward pass that is not delivered."""
        for parameter in self._parameters:
            parameter.grad = None

    def _hook(self):
        """Lets the backward pass hand over the gradients of parameters that are not frozen."""
        frozen = []
        for index in self._unhooked:
            parameter = self._parameters[index]
            if parameter.requires_grad:
                hook = functools.partial(self._on_accumulated, index)
                parameter.register_post_accumulate_grad_hook(hook)
            else:
                frozen.append(index)
        self._unhooked = frozen

    def _forget(self):
        self._batch = None
        # Of each parameter, its gradient and the gradient's version when it was moved.
        self._taken = [None] * len(self._parameters)
        # Number of parameters before those that are complete.
        self._left = len(self._parameters)
        self._buckets = 0

    def _begin(self):
        if self._batch is None:
            self._own = None
            self._batch = self._core.counted()
            if self._scaler is not None and not self._batch.before:
                with self._place.on_stream():
                    self.overflows.zero_()
        return self._batch

    def _on_accumulated(self, index, parameter):
        """Called in a backward pass, with the stream of the parameter's node in the graph."""
        if self._has_weights and self._is_mean:
            # step() has the weight.
            return
        batch = self._begin()
        if not batch.address:
            # Nothing that a discarded micro-batch, or code outside of the loop, computes is used.
            self._batch = None
            return
        if self._taken[index] is not None:
            raise RuntimeError(_TWICE)
        gradient = parameter.grad
        self._taken[index] = (gradient, gradient._version)
        if not batch.is_overlapped:
            return
        with self._place.on_stream(gradient), torch.no_grad():
            self._move(batch, [(index, gradient)])
            is_known = self._has_weights is not None or not self._is_mean
            if is_known and index == self._left - 1:
                self._announce()

    def _move(self, batch, gradients, weight=None):
        """Moves gradients of parameters, by their indices."""
        if not gradients:
            return
        flat = self._at(batch.address)[1]
        views = [flat[index] for index, _ in gradients]
        dense = [g.to_dense() if g.is_sparse else g for _, g in gradients]
        scale = 1
        if self._is_mean:
            scale = batch.records if weight is None else weight
        if self._scaler is not None:
            scale /= self._scaler.get_scale()
            dense = [self._finite(gradient) for gradient in dense]
        if batch.before:
            # A call for each would take longer than the work, if there are many.
            torch._foreach_add_(views, dense, alpha=scale)
        elif views[0].is_cuda:
            torch._foreach_copy_(views, dense)
            torch._foreach_mul_(views, scale)
        else:
            # In one pass over memory.
            for view, gradient in zip(views, dense, strict=True):
                torch.mul(gradient, scale, out=view)

    def _finite(self, gradient):
        """The gradient without elements that are not finite, which are noted."""
        finite = gradient.isfinite()
        self.overflows.logical_or_(~finite.all())
        return torch.where(finite, gradient, 0.0)

    def _announce(self):
        while self._left and self._taken[self._left - 1] is not None:
            self._left -= 1
        start = self._starts[self._left]
        buckets = (self.total - start) // self._bucket_len
        if buckets > self._buckets:
            self._buckets = buckets
            self._core.complete_from(start)

    def _at(self, address):
        """The flat array at an address, and its views as the parameters.

        The trainer uses a few arrays in turn.
        """
        found = self._flats.get(address)
        if found is None:
            flat = self._place.flat(address, self.total)
            found = self._flats[address] = self._viewed(flat)
            if len(self._flats) > _ARRAYS_MAX:
                self._flats.popitem(last=False)
        return found

    def _viewed(self, flat):
        ends = zip(self._parameters, self._starts, self._starts[1:], strict=False)
        return flat, [flat[start:end].view(p.shape) for p, start, end in ends]


_HOW = (
    "with overlap=False in job.optimizer(), gradients are taken by step(), still once for each "
    "micro-batch, and not during the backward pass"
)
_TWICE = (
    "a parameter got a gradient a second time in one micro-batch, and the first may have been "
    "summed over all workers: call backward() and step() once for each micro-batch. step() "
    "accumulates by itself: a step has as many records as --global-batch-size, or global_batch of "
    f"job.sampler(). For two backward passes of one micro-batch: {_HOW}"
)
_CHANGED = (
    "a gradient was changed or cleared between backward() and step(), and the workers sum it as it "
    f"was; to clip a step's gradient use clip_norm of job.optimizer(); {_HOW}"
)
_SOME_WEIGHTS = (
    "opt.step() got a weight for some micro-batches only; give each of them its weight, or none"
)
# What micro-batches tell the group: the sum of their weights, and the records of those that gave a
# parameter, by its number, no gradient.
WEIGHT = "weight"
UNUSED = "unused {}"
# The trainer has three, and with --deterministic one for each micro-batch of a step.
_ARRAYS_MAX = 64
