"""Learning-rate schedulers, which step with the commits of the group.

A loop calls ``scheduler.step()`` after ``opt.step()``: once per micro-batch, of which each worker
has its own number. The group's schedule must be a function of its committed steps. So a scheduler
of the optimizer steps in each commit, on all workers, and the calls of the loop have no effect;
they are only compared with what they would have had in a group of one. What a worker does at a
commit does not depend on its loop, because a worker that has just joined has not run its own yet.
"""

import contextlib
import inspect
import weakref

from torch.optim.lr_scheduler import LRScheduler


class Schedules:
    """The schedulers of a job's optimizer."""

    def __init__(self, optimizers, objects):
        """``optimizers``: the program's, and the one in its place."""
        known = [each for each in _made() if any(each.optimizer is one for one in optimizers)]
        parts = [id(part) for each in known for part in getattr(each, "_schedulers", ())]
        # Those that step by themselves. Others are stepped by these, or by functions of objects.
        self._own = [
            each for each in known if id(each) not in parts and not objects.has_function(each)
        ]
        for scheduler in self._own:
            _check_arguments(scheduler)
        for scheduler in known:
            scheduler.__class__ = self._watched(type(scheduler))
        # Schedulers whose step() the loop has not called since the last step of the optimizer.
        self._expected = []
        self._was_committed = False
        self._caller = "the loop"

    def objects(self):
        """Schedulers that step by themselves, by their names in the group's state."""
        return {f"scheduler {at} of the optimizer": each for at, each in enumerate(self._own)}

    def begin_step(self):
        """The loop calls the step of the optimizer."""
        if self._was_committed and self._expected:
            name = type(self._expected[0]).__name__
            raise RuntimeError(
                f"the loop did not call {name}.step() after the last opt.step(). A scheduler steps "
                "with each committed step of the job: call it after each opt.step(), where it takes"
                " effect if a step was committed. To step it once per epoch, declare that before "
                f"the loop, with {_ON_EPOCH}, and remove its calls"
            )

    def end_step(self, committed):
        """The step of the optimizer returns."""
        self._expected = list(self._own)
        self._was_committed = committed

    @contextlib.contextmanager
    def called_by(self, caller):
        """While functions of objects, or these schedulers, are called for a step."""
        self._caller = caller
        try:
            yield
        finally:
            self._caller = "the loop"

    def commit(self):
        """A step has changed the parameters."""
        with self.called_by("schedulers"):
            for scheduler in self._own:
                scheduler.step()

    def _watched(self, kind):
        """The class of a scheduler, with a ``step()`` that asks first."""
        schedules = self

        def step(self, *arguments, **options):
            if schedules._steps(self, bool(arguments or options)):
                kind.step(self, *arguments, **options)

        return type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})

    def _steps(self, scheduler, has_arguments):
        """Whether a call of this scheduler's ``step()`` takes effect."""
        name = type(scheduler).__name__
        is_own = any(scheduler is each for each in self._own)
        if self._caller == "schedulers" or (self._caller == "functions" and not is_own):
            return True
        if self._caller == "functions":
            raise RuntimeError(
                f"{name}.step() was called by a function of job.state() of another object, and the "
                f"scheduler steps by itself; declare the call, with {_ON_COMMIT}"
            )
        if not is_own:
            raise RuntimeError(
                f"{name}.step() is called by another scheduler or by a function of job.state(); "
                "remove the call from the loop"
            )
        if has_arguments:
            raise TypeError(f"{name}.step() takes no argument in a job: {_SAME}")
        if not self._expected or self._expected[0] is not scheduler:
            raise RuntimeError(
                f"{name}.step() was called at another place than once after each opt.step(), and "
                "in the order in which the schedulers were made, or more than once"
            )
        self._expected.pop(0)
        return False


def _check_arguments(scheduler):
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        raise ValueError(
            f"{type(scheduler).__name__} is not supported, because its step() needs an argument, "
            f"such as a metric: {_SAME}"
        ) from None


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
_ON_EPOCH = "job.state('schedule', scheduler, on_epoch=scheduler.step)"
_SAME = (
    "all workers must take the same step. Use a scheduler that depends on the number of steps "
    "alone, or call step() in a function on_commit or on_epoch of job.state(), with a value that "
    "is the same on all workers"
)
