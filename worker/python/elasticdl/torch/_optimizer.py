"""The optimizers of a job, as its loop sees them."""

import torch

from ._scaler import NO_SCALER


class Optimizer(torch.optim.Optimizer):
    """Takes the place of a ``torch.optim.Optimizer`` in a training loop."""

    def __init__(self, training, worker, inner):
        # The base class would make groups of its own. Groups, state and hooks are the inner one's.
        vars(self).update(
            (name, hooks) for name, hooks in vars(inner).items() if name.endswith("_hooks")
        )
        self._training = training
        self._worker = worker
        self._inner = inner

    @property
    def _step_supports_amp_scaling(self):
        # GradScaler.step() asks for it. It would unscale the gradient, and leave the step out if
        # the gradient of this worker alone overflows.
        raise TypeError(NO_SCALER)

    @property
    def defaults(self):
        """Those of the optimizer."""
        return self._inner.defaults

    @property
    def param_groups(self):
        """Those of the optimizer."""
        return self._inner.param_groups

    @property
    def state(self):
        """That of the optimizer; refused where it is divided over the workers."""
        self._training.check_whole("state")
        return self._inner.state

    def add_param_group(self, param_group):
        """Adds a group, before the first micro-batch is drawn."""
        self._worker.not_begun("add_param_group()")
        self._inner.add_param_group(param_group)

    def state_dict(self):
        """That of the optimizer; refused where it is divided over the workers."""
        self._training.check_whole("state_dict()")
        return self._inner.state_dict()

    def load_state_dict(self, state_dict):
        """Loads settings and state, before the first micro-batch is drawn. A job that resumes goes
        on with those of its checkpoint."""
        self._worker.not_begun("load_state_dict()")
        self._inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none=True):
        """Clears gradients. ``step()`` has cleared those that it has taken."""
        self._inner.zero_grad(set_to_none)

    def step(self, loss=None, *, weight=None):
        """Delivers the gradient of one micro-batch.

        Call it once for each micro-batch. It changes nothing until all records of the step are
        there; then it sums the gradients of all workers, updates the parameters and commits the
        records with them. Returns whether it did. ``loss``: the micro-batch's, to be reported.

        ``weight``: the number of what the loss is a mean of, if that is not the records: tokens
        that are no padding, say. With ``reduction="sum"``, the number that the step's sum is
        divided by. The step's gradient is then the mean over all of them, on all workers, however
        its records are divided. Give it with each micro-batch, or with none.
        """
        return self._training.step(self, loss, weight)
