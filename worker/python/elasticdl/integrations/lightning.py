"""The ``Trainer`` of Lightning, whose ``fit()`` the workers of a job divide.

::

    from elasticdl.integrations.lightning import Trainer     # in place of that of lightning

A batch of the trainer is a step of the job: the strategy computes the micro-batches that the worker
has in it, and sets the trainer's counters of batches, steps and epochs to those of the job. A
worker that joins begins in the epoch and with the step of its group.
"""

import lightning.pytorch as pl
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from ..torch import join
from ._common import BF16, ELASTICDL_TRAIN, RESUMES, STOPPED, refuse, training_loader


class Trainer(pl.Trainer):
    """Takes the place of ``lightning.Trainer``."""

    def __init__(self, *, job=None, seed=0, **options):
        """``job``: what ``elasticdl.torch.join()`` has returned. Default: joins. ``seed``: of the
        order of records, without a master. ``options``: of the base class.
        """
        # First, as what is refused then ends the job.
        self.job = join() if job is None else job
        take = options.pop
        refuse(
            (take("strategy", "auto") != "auto", "a strategy", ELASTICDL_TRAIN),
            (take("devices", "auto") not in ("auto", 1), "several devices", ELASTICDL_TRAIN),
            (take("num_nodes", 1) != 1, "num_nodes", ELASTICDL_TRAIN),
            (options.get("precision") in ("16-mixed", 16, "16"), "fp16", BF16),
            (options.get("gradient_clip_algorithm") == "value", "clipping by value", "by norm"),
            *((options.get(name), name, _LESS) for name in _LESS_DATA),
        )
        if self.job._worker.core is not None:
            # The job shows its progress.
            options.setdefault("enable_progress_bar", False)
        clip_norm = take("gradient_clip_val", None) or None
        batches = take("accumulate_grad_batches", 1)
        strategy = ElasticStrategy(self.job, clip_norm=clip_norm, batches=batches, seed=seed)
        super().__init__(strategy=strategy, devices=1, **options)
        # The job has its own for SIGTERM.
        self._signal_connector.register_signal_handlers = lambda: None

    def fit(self, model, *arguments, ckpt_path=None, **options):
        """As that of the base class."""
        refuse(
            (ckpt_path, "ckpt_path", RESUMES),
            (not model.automatic_optimization, "manual optimization", _LOOP),
        )
        super().fit(model, *arguments, **options)


class ElasticStrategy(SingleDeviceStrategy):
    """One device of this worker, and steps of the job."""

    strategy_name = "elasticdl"

    def __init__(self, job, *, clip_norm, batches, seed):
        super().__init__(device=job.device)
        self.job = job
        self._clip_norm, self._batches, self._seed = clip_norm, batches, seed
        self._data = self._batch = None

    @property
    def is_global_zero(self):
        """Whether this worker logs and saves: the main one."""
        return self.job._acts_for_all()

    def setup_optimizers(self, trainer):
        """Declares module and optimizer to the job."""
        super().setup_optimizers(trainer)
        rank_zero_only.rank = int(not self.is_global_zero)
        self.job.model(self.lightning_module)
        self.optimizers = [
            self.job.optimizer(each, clip_norm=self._clip_norm) for each in self.optimizers
        ]

    def process_dataloader(self, dataloader):
        """Divides the batches of the loader for training."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        is_loader = isinstance(dataloader, DataLoader) and self._data is None
        refuse((not is_loader, "data but one DataLoader", "return it from train_dataloader()"))
        loop = trainer.fit_loop
        loader = training_loader(
            self.job,
            dataloader,
            self._batches,
            epochs=max(1, loop.max_epochs),
            max_steps=loop.max_steps if loop.max_steps > 0 else None,
            seed=self._seed,
        )
        loop.max_epochs, loop.epoch_loop.max_steps = self.job._worker.core.options.epochs, -1
        self._data = _Data(self.job, loader, trainer)
        return self._data

    def training_step(self, batch, *arguments, **options):
        """The training step of this micro-batch."""
        batch = batch if self._batch is None else self._batch
        return super().training_step(batch, *arguments, **options)

    def optimizer_step(self, optimizer, closure, model=None, **options):
        """Computes micro-batches until a step is committed."""
        del model, options
        loss = closure()
        while not optimizer.step(loss):
            batch = self._data.draw()
            if batch is None:
                break
            self._batch = self._on_device(batch)
            loss = closure()
        self._batch = None
        rank_zero_only.rank = int(not self.is_global_zero)
        # The trainer adds the step.
        self._data.note(self.job.step - 1)
        return loss

    def _on_device(self, batch):
        # As the loop of the trainer does.
        batch = self.precision_plugin.convert_input(batch)
        batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch, dataloader_idx=0)

    def on_train_end(self):
        """The job has ended, too."""
        if self._data.begin_epoch():
            raise RuntimeError(STOPPED)


class _Data:
    """The micro-batches of this worker; each iteration is an epoch."""

    def __init__(self, job, loader, trainer):
        self.dataset = loader.dataset
        self._job, self._loader, self._trainer = job, loader, trainer
        self._epochs, self._epoch = job.epochs(), None
        self._batches, self._is_new = iter(()), False

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        if self._is_new:
            # The trainer does so twice before it begins with a later epoch than the first.
            return self
        is_first = self._epoch is None
        if self.begin_epoch():
            self._batches, self._is_new = iter(self._loader), True
            if is_first:
                progress = self._trainer.fit_loop.epoch_progress
                for each in progress.current, progress.total:
                    each.ready = each.started = each.processed = each.completed = self._epoch
        return self

    def __next__(self):
        self._is_new = False
        batch = self.draw()
        if batch is None:
            self._end()
            raise StopIteration
        return batch

    def draw(self):
        """The next micro-batch of the epoch; None if there is none."""
        return next(self._batches, None)

    def _end(self):
        """What is left of the epoch has no micro-batch of this worker."""
        if self._epoch is None:
            self._trainer.should_stop = True
            return
        self.note(self._job.step)
        loop = self._trainer.fit_loop
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        loop.epoch_loop.on_advance_end(loop._data_fetcher)

    def begin_epoch(self):
        """Begins the next epoch of the job. Returns whether there is one."""
        self._epoch = next(self._epochs, None)
        return self._epoch is not None

    def note(self, steps):
        """Sets the counters of the trainer to those of the job, of which it has counted these."""
        fit, worker = self._trainer.fit_loop, self._job._worker
        loop, fetcher = fit.epoch_loop, fit._data_fetcher
        before = self._epoch * len(self)
        progress = loop.batch_progress.current
        progress.ready = progress.started = fetcher.fetched = self._job.step - before
        progress.processed = progress.completed = steps - before
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps
        fetcher.done = loop.batch_progress.is_last_batch = worker.is_epoch_over()
        # By --max-steps.
        self._trainer.should_stop = self._trainer.should_stop or worker.ended


_LOOP = "write the loop yourself, with job.model() and job.optimizer() of elasticdl.torch"
_LESS_DATA = (
    *("fast_dev_run", "limit_train_batches", "overfit_batches", "max_time"),
    *("min_epochs", "min_steps", "reload_dataloaders_every_n_epochs"),
)
_LESS = "a job trains each record of an epoch; end it with --max-steps (without a master max_steps)"
