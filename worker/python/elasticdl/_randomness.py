"""The generators of random numbers that a loop uses without saying so."""

import random
import sys


class Randomness:
    """The global generators of Python, NumPy and PyTorch (that of the CPU). While a gradient is
    computed that is compared with that of another worker, they give numbers of its records."""

    def __init__(self):
        # Sets each generator back.
        self._resets = []

    def seed(self, seed):
        """The generators give the numbers of ``seed`` until :meth:`reset`."""
        self.reset()
        self._resets.append((random.setstate, random.getstate()))
        random.seed(seed)
        # Packages that the program does not use are not loaded.
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        if numpy is not None:
            self._resets.append((numpy.set_state, numpy.get_state()))
            # Not as Python seeds the same generator, whose numbers are others then.
            numpy.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
        if torch is not None:
            self._resets.append((torch.set_rng_state, torch.get_rng_state()))
            torch.default_generator.manual_seed(seed)

    def reset(self):
        """The generators go on where they were."""
        for reset, state in self._resets:
            reset(state)
        self._resets.clear()
