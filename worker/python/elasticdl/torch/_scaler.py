"""Scales of losses, for gradients that float16 can't represent otherwise."""

import torch


class Scaler:
    """Takes the place of a ``torch.amp.GradScaler`` in a training loop.

    The scale is a part of the group's state. It changes with a committed step, on all workers: if
    the gradient of any micro-batch of the step was not finite, the optimizer leaves the step out,
    and the scale shrinks; after a number of other steps it grows.
    """

    def __init__(self, scaler):
        self._enabled = scaler.is_enabled()
        self._scale = float(scaler.get_scale()) if self._enabled else 1.0
        self._growth_tracker = 0
        if self._enabled:
            self._growth_factor = scaler.get_growth_factor()
            self._backoff_factor = scaler.get_backoff_factor()
            self._growth_interval = scaler.get_growth_interval()

    def scale(self, outputs):
        """Multiplies a tensor, or several, by the scale."""
        if not self._enabled:
            return outputs
        if torch.is_tensor(outputs):
            return outputs * self._scale
        return type(outputs)(self.scale(output) for output in outputs)

    def unscale_(self, optimizer):
        """Not here: a step's gradient is unscaled when it has been summed."""
        raise RuntimeError(
            "the gradient of a step is unscaled in step(); to clip it, use clip_norm of "
            "job.optimizer()"
        )

    def step(self, optimizer, loss=None, *, weight=None):
        """Calls ``optimizer.step(loss, weight=weight)``."""
        return optimizer.step(loss, weight=weight)

    def update(self):
        """Does nothing: the scale changes with a committed step."""

    def get_scale(self):
        """The scale."""
        return self._scale

    def is_enabled(self):
        """Whether it scales."""
        return self._enabled

    def state_dict(self):
        """The scale, and the number of steps since it changed."""
        return {"scale": self._scale, "growth_tracker": self._growth_tracker}

    def load_state_dict(self, state):
        """Takes the scale over from a state."""
        self._scale, self._growth_tracker = state["scale"], state["growth_tracker"]

    def _commit(self, overflows):
        """Adapts the scale to a step. ``overflows``: whether a gradient was not finite."""
        if overflows:
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            self._scale *= self._growth_factor
            self._growth_tracker = 0


# A worker whose gradient is not finite contributes this number as the first element, and leaves the
# elements at fault out: the sum over all workers is finite, and no other gradient is as large.
OVERFLOW = 2.0**100


def overflows(total):
    """Whether a worker's gradient was not finite, by the sum over all workers."""
    return abs(float(total[0])) > 2.0**99


# Why a loop must not use PyTorch's own.
NO_SCALER = (
    "a GradScaler changes its scale with each micro-batch of one worker, and all workers must take "
    "the same step; use the one that job.scaler(scaler) returns"
)
