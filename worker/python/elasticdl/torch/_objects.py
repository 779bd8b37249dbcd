"""Objects of the program that are a part of the group's state."""


class Objects:
    """The objects of ``job.state()``, and the functions that change them."""

    def __init__(self):
        self.by_name = {}
        self._changed = []
        self._on_commit = []
        self._on_epoch = []
        self._epoch = _Epoch()

    def add(self, name, value, on_commit=None, on_epoch=None):
        """Adds an object, and functions to call after each step, and before an epoch's first."""
        self.by_name[name] = value
        for function, functions in (on_commit, self._on_commit), (on_epoch, self._on_epoch):
            if function is not None:
                functions.append(function)
                self._changed.append(value)
        if on_epoch is not None:
            self.by_name["the epoch"] = self._epoch

    def has_function(self, value):
        """Whether a function that was added with this object changes it."""
        return any(value is each for each in self._changed)

    def begin_step(self, epoch):
        """A step of this epoch is about to change the parameters."""
        while self._on_epoch and self._epoch.number < epoch:
            self._epoch.number += 1
            for function in self._on_epoch:
                function()

    def commit(self):
        """A step has changed the parameters."""
        for function in self._on_commit:
            function()


class _Epoch:
    """The epoch of the last step."""

    number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]
