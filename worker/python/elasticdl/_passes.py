"""Loops over the data of a group, each of which is one epoch."""


class Passes:
    """What a worker of a job and a rank of a group of a fixed size have in common."""

    # Where the program gets its epochs and its data from.
    loop, source = "job.epochs()", "job.sampler()"
    # The epoch of the loop over the epochs.
    epoch = None
    # Whether the loop over the data may be empty, as others have trained the whole epoch.
    may_be_empty = False
    # Whether all epochs are trained.
    ended = False

    def begin_epoch(self):
        """Forgets what was drawn and not committed. Returns the epoch of the next step; None if
        all are trained."""
        raise NotImplementedError

    def place(self):
        """Epoch and number of the next step."""
        raise NotImplementedError

    def epochs(self):
        """See ``Job.epochs()``."""
        while (epoch := self.begin_epoch()) is not None:
            self.epoch = epoch
            yield epoch
            if not self.is_epoch_over():
                raise RuntimeError(
                    f"the loop over the data was left in epoch {epoch}, after step "
                    f"{self.place()[1]}, before all records of the epoch were trained. Iterate to "
                    "the loader's end; to train less, end the job with --max-steps (without a "
                    f"master max_steps of {self.source}), or give it less data"
                )

    def is_epoch_over(self):
        """Whether all records of the loop's epoch are committed."""
        return self.ended or (self.epoch is not None and self.place()[0] > self.epoch)

    def begin_pass(self):
        """A loop over the sampler begins."""
        if self.may_be_empty:
            self.may_be_empty = False
        elif self.is_epoch_over():
            which = "the job" if self.epoch is None else f"epoch {self.epoch}"
            raise RuntimeError(
                f"{which} is complete, and this loop over its data would be empty. Each epoch of "
                f"`for epoch in {self.loop}:` has one loop over the loader, and their number is "
                f"--num-epochs (without a master epochs of {self.source}); for another use of the "
                "data, such as a test, make another loader, without the job's sampler"
            )

    def check_loop(self, epochs):
        """Before a draw, where there are so many epochs."""
        if self.epoch is None and epochs > 1:
            raise RuntimeError(
                f"there are {epochs} epochs, and a loop over the data is one of them: write "
                f"`for epoch in {self.loop}:` around it"
            )
