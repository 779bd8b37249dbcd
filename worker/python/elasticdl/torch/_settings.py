"""Settings of the optimizer that a loop changes, such as a rate by formula.

The loops of the workers run apart, and one that has just joined has not run at all. So a change is
a part of the step: each worker tells with its micro-batches what its loop has changed since the
last commit, and in the commit all workers apply the changes of the oldest one, which become a part
of the group's state. They are equal where the loops compute them from what is the same on all
workers, such as ``job.step``; a worker whose loop has set something else stops with an error.
"""

import contextlib
import json

import torch

from ._state import as_like, decode, encode


class Settings:
    """The settings of an optimizer after the last commit of the group, and what the loop changes
    since."""

    def __init__(self, optimizer, worker):
        self._optimizer = optimizer
        self._worker = worker
        # What the micro-batches of this worker in the step have told, and what the step has.
        self._told = self._telling = self._decided = None
        self.note()

    def note(self):
        """They are right now: the group has changed them."""
        self._noted = self._comparable()
        self._values = [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    @contextlib.contextmanager
    def noting(self):
        """What is changed meanwhile is right, as all workers change it."""
        before = self._comparable()
        yield
        for at, (old, new) in enumerate(zip(before, self._comparable(), strict=True)):
            for name in new:
                if name != "params" and old.get(name) != new[name]:
                    self._noted[at][name] = new[name]
                    self._values[at][name] = _copied(self._optimizer.param_groups[at][name])

    def tell(self):
        """What the loop has changed, as a name for the tally of the step."""
        text = json.dumps(self._changes(), separators=(",", ":"))
        if len(text) > _CHANGES_MAX:
            raise RuntimeError(
                f"the loop changed settings of the optimizer that take {len(text)} bytes, and a "
                f"step can have {_CHANGES_MAX}; make fewer parameter groups"
            )
        if self._told not in (None, text):
            before, after = _shown(self._told), _shown(text)
            raise RuntimeError(f"the loop set {before} and then {after} in one step. {_FORMULA}")
        self._telling = text
        return f"{_TOLD}{self._worker.core.id} {text}"

    def begin_commit(self):
        """A step is about to change the parameters. What this loop has changed does not count until
        it is told, and told by the oldest worker."""
        for group, values, noted in zip(
            self._optimizer.param_groups, self._values, self._noted, strict=True
        ):
            for name, value in values.items():
                if name not in group or _mark(name, group[name]) != noted[name]:
                    group[name] = _copied(value)

    def decide(self, tally):
        """Makes the changes of the step. ``tally``: what the workers have told in it."""
        told = [name.removeprefix(_TOLD).split(" ", 1) for name in tally if name.startswith(_TOLD)]
        _, self._decided = min(((int(worker), text) for worker, text in told), default=(0, "[]"))
        for at, name, value in json.loads(self._decided):
            group = self._optimizer.param_groups[at]
            group[name] = as_like(decode(value), group.get(name))

    def end_step(self, delivered):
        """The step of the optimizer returns."""
        if delivered.counts:
            self._told = self._telling
        if delivered.committed:
            told, self._told = self._told, None
            if told not in (None, self._decided):
                raise RuntimeError(
                    f"the loop of this worker set {_shown(told)}, and step "
                    f"{self._worker.progress('step')} was made with {_shown(self._decided)}, as "
                    f"the oldest worker had it. {_FORMULA}"
                )

    def _changes(self):
        """Group, name and value of each setting that has changed."""
        now = self._comparable()
        if now == self._noted:
            return []
        if [group["params"] for group in now] != [group["params"] for group in self._noted]:
            raise RuntimeError(
                "the optimizer has other parameters than when training began; declare all of them "
                "before the first micro-batch is drawn"
            )
        changes = []
        for at, (after, before) in enumerate(zip(now, self._noted, strict=True)):
            for name in {**before, **after}:
                if name not in before or name not in after:
                    raise RuntimeError(
                        f"the settings of the optimizer had {'no' if name in after else 'a'} {name}"
                        " when training began. Change the values of those that it has; make a "
                        "scheduler before the first micro-batch is drawn"
                    )
                if after[name] != before[name]:
                    value = self._optimizer.param_groups[at][name]
                    if name in _OF_STATE and value and not before[name]:
                        raise RuntimeError(
                            f"the loop set the optimizer's {name} to {value}, and what it was when "
                            "training began needs less state, which is all that there is; set it "
                            "before the first micro-batch is drawn"
                        )
                    changes.append((at, name, encode(value, f"the optimizer's {name}")))
        return changes

    def _comparable(self):
        return [
            {name: _mark(name, value) for name, value in group.items()}
            for group in self._optimizer.param_groups
        ]


def _mark(name, value):
    """What differs if a setting has changed."""
    if name == "params":
        return id(value), len(value)
    # Reading a tensor on a GPU would wait for it.
    return (id(value), value._version) if torch.is_tensor(value) else value


def _copied(value):
    return value.detach().clone() if torch.is_tensor(value) else value


def _shown(text):
    """Changes, for a message."""
    changes = [f"{name} to {decode(value)}" for _, name, value in json.loads(text)]
    return ", ".join(dict.fromkeys(changes)) or "nothing"


_FORMULA = (
    "All workers must make the same step: compute settings from job.step, or from the epoch, and "
    "not from a counter or a loss of the loop"
)
# Settings with which an optimizer has a further state.
_OF_STATE = ("amsgrad", "centered", "momentum")
_TOLD = "settings "
_CHANGES_MAX = 1 << 16
