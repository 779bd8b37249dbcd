"""Learning-rate schedulers, which step with the commits of the group.

A loop calls ``scheduler.step()`` after ``opt.step()``, once per micro-batch, of which each worker
has its own number; or it calls it after each loop over the data, once per epoch. The group's
schedule must be a function of its committed steps. So a scheduler of the optimizer steps in the
commits, on all workers, and the calls of the loop only say when: after the first step, each worker
knows whether they come with steps or with epochs, and says so with its next gradient. From then on
this is a part of the group's state, and the calls are compared with it. What a worker does at a
commit does not depend on its loop, because a worker that has just joined has not run its own yet.

``ReduceLROnPlateau.step(metric)`` stands after a loop over the data. Each worker tells its metric
with the next epoch's first step, in whose commit all workers take the scheduler's step, with the
mean over the workers.
"""

import contextlib
import inspect
import weakref

from torch.optim.lr_scheduler import LRScheduler


class Schedules:
    """The schedulers of a job's optimizer."""

    def __init__(self, worker, optimizers, objects, noting):
        """``optimizers``: the program's, and the one in its place. ``noting()``: a context in
        which schedulers change their settings in the loop."""
        known = [each for each in _made() if any(each.optimizer is one for one in optimizers)]
        parts = [id(part) for each in known for part in getattr(each, "_schedulers", ())]
        # Those that step by themselves. Others are stepped by these, or by functions of objects.
        own = [each for each in known if id(each) not in parts and not objects.has_function(each)]
        self._worker = worker
        self._noting = noting
        self._own = [_Own(scheduler) for scheduler in own]
        for scheduler in known:
            scheduler.__class__ = self._watched(type(scheduler))
        # Whether the loop has called the optimizer's step(), and whether the last call committed;
        # whether it has drawn since.
        self._has_stepped = self._was_committed = self._has_drawn = False
        # Epoch of the loop at its last call of the optimizer's step().
        self._epoch = None
        self._caller = "the loop"

    def objects(self):
        """What is a part of the group's state, by name."""
        pairs = [(f"scheduler {at} of the optimizer", own) for at, own in enumerate(self._own)]
        objects = {name: own.scheduler for name, own in pairs}
        return {**objects, **{f"steps of {name}": own for name, own in pairs}}

    def drawn(self):
        """The loop asks for a micro-batch."""
        self._has_drawn = True

    def begin_step(self):
        """The loop calls the step of the optimizer. Returns what the workers tell each other."""
        epoch = self._worker.epoch or 0
        has_epoch_ended = self._epoch is not None and epoch > self._epoch
        self._epoch = epoch
        for own in self._own:
            if own.is_awaited and self._was_committed:
                own.guess("epoch")
            if own.is_awaited and self._was_committed and own.mode() == "step":
                raise RuntimeError(_not_called(own, "step"))
            if has_epoch_ended and own.mode() == "epoch" and own.epochs_called < epoch:
                raise RuntimeError(_not_called(own, "epoch"))
        told = []
        for at, own in enumerate(self._own):
            if own.guessed:
                told.append((f"scheduler {at} {own.guessed}", 1))
            if own.metric is not None:
                told.append((f"metric {at} {own.metric!r}", len(self._worker.drawn[0])))
        return told

    def end_step(self, committed):
        """The step of the optimizer returns."""
        self._has_stepped, self._was_committed, self._has_drawn = True, committed, False
        for own in self._own:
            own.is_awaited = own.mode() != "epoch"
            if committed:
                own.metric = None

    @contextlib.contextmanager
    def called_by(self, caller):
        """While functions of objects, or these schedulers, are called for a step."""
        self._caller = caller
        try:
            yield
        finally:
            self._caller = "the loop"

    def begin_commit(self, epoch, tally):
        """A step of this epoch is about to change the parameters. ``tally``: what the workers have
        told each other in it, by name."""
        with self.called_by("schedulers"):
            for at, own in enumerate(self._own):
                modes = [mode for mode in ("step", "epoch") if f"scheduler {at} {mode}" in tally]
                if own.of_group is None and modes:
                    own.settle(modes[0])
                if own.takes_metric:
                    own.advance_by(_mean_of(f"metric {at} ", tally), epoch)
                elif own.of_group == "epoch":
                    own.advance_to(epoch)

    def commit(self):
        """A step has changed the parameters."""
        with self.called_by("schedulers"):
            for own in self._own:
                own.commit()

    def _watched(self, kind):
        """The class of a scheduler, with a ``step()`` that asks first."""
        schedules = self

        def step(self, *arguments, **options):
            if schedules._steps(self, arguments, options):
                kind.step(self, *arguments, **options)

        return type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})

    def _steps(self, scheduler, arguments, options):
        """Whether a call of this scheduler's ``step()`` takes effect at once."""
        name = type(scheduler).__name__
        own = next((own for own in self._own if own.scheduler is scheduler), None)
        if self._caller == "schedulers" or (self._caller == "functions" and own is None):
            return True
        if self._caller == "functions":
            raise RuntimeError(
                f"{name}.step() was called by a function of job.state() of another object, and the "
                f"scheduler steps by itself; declare the call, with {_ON_COMMIT}"
            )
        if own is None:
            raise RuntimeError(
                f"{name}.step() is called by another scheduler or by a function of job.state(); "
                "remove the call from the loop"
            )
        if own.takes_metric:
            values = [*arguments, *options.values()]
            if len(values) != 1:
                raise TypeError(f"{name}.step() takes one argument in a job, its metric")
            own.metric = float(values[0])
        elif arguments or options:
            raise TypeError(f"{name}.step() takes no argument in a job: {_SAME}")
        self._called(own)
        return False

    def _called(self, own):
        """The loop calls the scheduler's ``step()``."""
        if self._was_committed:
            own.guess("epoch" if self._has_drawn else "step")
        with self.called_by("schedulers"), self._noting():
            if own.mode() == "epoch":
                epochs = self._epochs_over()
                if epochs is None or epochs <= own.epochs_called:
                    raise RuntimeError(f"{own.name}.step() {_ELSEWHERE}")
                own.epochs_called = epochs
                if not own.takes_metric:
                    own.advance_to(epochs)
            else:
                earlier = self._own[: self._own.index(own)]
                is_late = any(each.is_awaited and each.mode() == "step" for each in earlier)
                if not own.is_awaited or is_late:
                    raise RuntimeError(f"{own.name}.step() {_ELSEWHERE}")
                own.is_awaited = False
                if self._was_committed:
                    own.catch_up()

    def _epochs_over(self):
        """Number of epochs that are over where the loop is; None if it is within one."""
        epoch = self._worker.epoch or 0
        if self._worker.is_epoch_over():
            return epoch + 1
        # Before the first step of another epoch.
        return epoch if self._epoch is not None and epoch > self._epoch else None


class _Own:
    """A scheduler that steps by itself, and when, as a part of the group's state."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        # Whether its step has an argument, and the one of the loop's last call, until it is told.
        self.takes_metric = _needs_argument(scheduler)
        self.metric = None
        # Of the group: "step" or "epoch", once a worker has told it; the commits before, and the
        # epochs that it has stepped for.
        self.of_group = "epoch" if self.takes_metric else None
        self._pending = 0
        self._epochs = 0
        # Of the loop: the same, as far as it has shown; how many of the pending steps were made at
        # its call; whether a call is due since the last step of the optimizer; and the epochs that
        # it has called for.
        self.guessed = None
        self._early = 0
        self.is_awaited = False
        self.epochs_called = 0

    @property
    def name(self):
        return type(self.scheduler).__name__

    def state_dict(self):
        return {"mode": self.of_group, "pending": self._pending, "epochs": self._epochs}

    def load_state_dict(self, state):
        self.of_group, self._pending = state["mode"], state["pending"]
        self._epochs, self._early = state["epochs"], 0

    def mode(self):
        """"step" or "epoch"; None as long as it is not known."""
        return self.of_group or self.guessed

    def guess(self, mode):
        """What the loop has done says this, unless it is known."""
        if self.mode() is None:
            self.guessed = mode

    def settle(self, mode):
        """The group knows it now."""
        self.of_group = mode
        if mode == "step":
            self.catch_up()
        self._pending = self._early = 0

    def catch_up(self):
        """Makes the steps of the commits before the mode was known."""
        while self._early < self._pending:
            self._early += 1
            self._step()

    def advance_to(self, epochs):
        """Makes the steps for so many epochs that are over."""
        while self._epochs < epochs:
            self._epochs += 1
            self._step()

    def advance_by(self, metric, epochs):
        """Makes the step for the last of so many epochs that are over, if there is a metric."""
        if metric is not None and self._epochs < epochs:
            self._epochs = epochs
            self._step(metric)

    def commit(self):
        """A step has changed the parameters."""
        if self.of_group == "step":
            self._step()
        elif self.of_group is None:
            self._pending += 1

    def _step(self, *metric):
        # What PyTorch asks, to warn of a loop that forgets the optimizer. The optimizer has stepped
        # with the group, also on a worker whose own loop has not begun.
        self.scheduler.optimizer._opt_called = True
        self.scheduler.step(*metric)


def _not_called(own, each):
    return (
        f"the loop did not call {own.name}.step() after the last "
        + ("opt.step()" if each == "step" else "epoch")
        + ". A scheduler steps with each committed step of the job, or with each epoch: call it "
        "after each opt.step(), where it takes effect if a step was committed, or after each loop "
        "over the data in `for epoch in job.epochs():`"
    )


def _needs_argument(scheduler):
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        return True
    return False


def _mean_of(start, tally):
    """The mean of the numbers in the names that start so, weighted by their values."""
    names = [name for name in tally if name.startswith(start)]
    told = [(float(name.removeprefix(start)), tally[name]) for name in names]
    if len(told) < 2:
        # As it is.
        return told[0][0] if told else None
    return sum(number * weight for number, weight in told) / sum(weight for _, weight in told)


def _watch():
    """Lets PyTorch's schedulers be known: an optimizer does not know its own."""
    made = []

    def new(kind, *arguments, **options):
        del arguments, options
        scheduler = super(LRScheduler, kind).__new__(kind)
        made.append(weakref.ref(scheduler, made.remove))
        return scheduler

    LRScheduler.__new__ = staticmethod(new)
    return lambda: [each for each in (ref() for ref in made) if hasattr(each, "optimizer")]


# Returns the schedulers in the order in which they were made.
_made = _watch()
_ON_COMMIT = "job.state('schedule', scheduler, on_commit=scheduler.step)"
_ELSEWHERE = (
    "was called at another place than once after each opt.step() or once after each epoch, and in "
    "the order in which the schedulers were made, or more than once"
)
_SAME = (
    "all workers must take the same step. Use a scheduler that depends on the number of steps "
    "alone, or call step() in a function on_commit or on_epoch of job.state(), with a value that "
    "is the same on all workers"
)
