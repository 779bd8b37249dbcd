"""Several optimizers, as one."""


def optimizers_of(optimizer):
    """The optimizers that this one is."""
    return optimizer._optimizers if isinstance(optimizer, Together) else [optimizer]


class Together:
    """What the training of a module uses of an optimizer, of several with different parameters."""

    def __init__(self, optimizers):
        self._optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state = _States(optimizers)

    def step(self):
        """Each of them steps."""
        for each in self._optimizers:
            each.step()


class _States:
    """The states of their parameters."""

    def __init__(self, optimizers):
        self._of = {
            parameter: each
            for each in optimizers
            for group in each.param_groups
            for parameter in group["params"]
        }

    def __len__(self):
        return sum(parameter in each.state for parameter, each in self._of.items())

    def __getitem__(self, parameter):
        return self._of[parameter].state[parameter]

    def get(self, parameter, default):
        return self._of[parameter].state.get(parameter, default)

    def clear(self):
        for each in self._of.values():
            each.state.clear()
