"""The ``Trainer`` of transformers, whose training the workers of a job divide.

::

    from elasticdl.integrations.transformers import Trainer     # in place of that of transformers

A step of the trainer is a step of the job: ``training_step()`` computes the micro-batches that the
worker has in it, and the optimizer's ``step()``, which the trainer calls next, has been made. So
``global_step``, logging, schedules and the intervals of evaluation and saving count steps of the
job. A worker that joins begins in the epoch and with the step of its group.
"""

import copy
import math

import transformers
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..torch import Optimizer, join
from ._common import (
    BF16,
    COUNTS,
    ELASTICDL_TRAIN,
    RESUMES,
    STOPPED,
    refuse,
    training_loader,
    use_device,
)

use_device()


class ElasticTrainer:
    """What makes a subclass of ``transformers.Trainer`` elastic, as its first base class."""

    def __init__(self, *arguments, job=None, **options):
        """``job``: what ``elasticdl.torch.join()`` has returned. Default: joins."""
        self.job = join() if job is None else job
        self._elastic = None
        super().__init__(*arguments, **options)
        args = self.args = copy.copy(self.args)
        refuse(
            (args.world_size > 1, "a group of torch.distributed", ELASTICDL_TRAIN),
            (args.deepspeed or args.fsdp, "DeepSpeed and FSDP", ELASTICDL_TRAIN),
            (args.fp16, "fp16", BF16),
            (args.enable_jit_checkpoint, "enable_jit_checkpoint", "the job has its checkpoints"),
            (args.auto_find_batch_size, "auto_find_batch_size", "give per_device_train_batch_size"),
            (
                args.load_best_model_at_end or args.save_strategy == "best",
                "load_best_model_at_end and save_strategy='best'",
                "declare job.evaluator(), and start the job with --validation-data, --best-metric "
                "and --export-best",
            ),
            (
                args.train_sampling_strategy not in ("random", "sequential"),
                f"train_sampling_strategy={str(args.train_sampling_strategy)!r}",
                "the job orders its records (--shuffle); sort the data set by length, and use "
                "--shuffle block",
            ),
            (args.dataloader_drop_last, "dataloader_drop_last", COUNTS),
        )
        self._batch = args.per_device_train_batch_size
        # The job accumulates.
        self._batches, args.gradient_accumulation_steps = args.gradient_accumulation_steps, 1
        # As the job places each worker.
        args._n_gpu = min(args.n_gpu, 1)
        # Before the others, which use what it sets.
        self.callback_handler.callbacks.insert(0, _Counters(self))
        if self.job._worker.core is not None:
            # Lines of the main worker, which another one may become.
            for callback in ProgressCallback, PrinterCallback:
                self.remove_callback(callback)
            self.add_callback(_Printer(self.job))

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """As that of the base class."""
        refuse(
            (
                resume_from_checkpoint,
                "resume_from_checkpoint",
                f"{RESUMES}; from_pretrained() loads the weights of a checkpoint",
            )
        )
        return super().train(None, trial, ignore_keys_for_eval)

    def is_world_process_zero(self):
        """Whether this worker logs and saves: the main one."""
        return self.job._acts_for_all()

    is_local_process_zero = is_world_process_zero

    def save_model(self, output_dir=None, _internal_call=False):
        """Saves the model, on the main worker."""
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model, trial):
        if self.is_world_process_zero():
            super()._save_checkpoint(model, trial)

    # ---- data ----

    def get_train_dataloader(self):
        """A loader of the micro-batches of this worker."""
        args = self.args
        loader = super().get_train_dataloader()
        is_alone = self.job._worker.core is None
        order = self._order(len(loader.dataset)) if is_alone else {}
        # The loader has the batches of accelerate.
        loader = training_loader(self.job, loader, self._batches, batch=self._batch, **order)
        if not is_alone:
            args.num_train_epochs, args.max_steps = self.job._worker.core.options.epochs, -1
        return loader

    def _order(self, length):
        args = self.args
        steps = math.ceil(length / (self._batch * self._batches))
        most = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps)
        return {
            "epochs": math.ceil(most / steps),
            "max_steps": most,
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "shuffle": args.train_sampling_strategy == "random",
        }

    def get_total_train_batch_size(self, args):
        """Records of a step of the job."""
        del args
        return self.job._worker.core.options.global_batch

    # ---- steps ----

    def create_optimizer(self, model=None):
        """Declares module and optimizer to the job."""
        if self._elastic is None:
            inner = super().create_optimizer(model)
            self.job.model(self.model)
            clip_norm = self.args.max_grad_norm or None
            self._elastic = self.job.optimizer(inner, clip_norm=clip_norm)
            self.optimizer = _Stepped(self._elastic._training, self.job._worker, inner)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        """As that of the base class."""
        return super().create_scheduler(num_training_steps, optimizer or self._elastic)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        self._epochs = self.job.epochs()
        self._epoch = next(self._epochs, None)
        self._note()
        return prepared

    def _note(self):
        """Sets the counters of the trainer to those of the job."""
        self.state.global_step = self.job.step
        self.state.epoch = self.job.step / self.job._worker.steps_per_epoch
        is_main = self.is_world_process_zero()
        self.state.is_world_process_zero = self.state.is_local_process_zero = is_main

    def _run_epoch(self, *, epoch, **options):
        del epoch
        self._has_computed = False
        if self._epoch is not None:
            super()._run_epoch(epoch=self._epoch, **options)
            is_stopped = self.control.should_training_stop and self._has_computed
            self._epoch = next(self._epochs, None)
            if is_stopped and self._epoch is not None:
                raise RuntimeError(STOPPED)
        self.control.should_training_stop = self._epoch is None

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """As that of the base class."""
        self._iterator = epoch_iterator
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Computes micro-batches until a step is committed. Returns the mean of their losses."""
        total = count = 0
        while inputs is not None:
            records = len(self.job.micro_batch)
            loss = super().training_step(model, inputs, num_items_in_batch)
            weight = records if num_items_in_batch is None else num_items_in_batch
            total, count = total + loss * weight, count + weight
            if self._elastic.step(loss, weight=num_items_in_batch):
                break
            inputs = next(self._iterator, None)
            if inputs is not None:
                num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        self._has_computed = True
        return total / count

    def _clip_grad_norm(self, model):
        """The optimizer clips the gradient of the step, by ``max_grad_norm``."""

    def _get_grad_norm(self, model, grad_norm=None):
        """It is not known here."""


class Trainer(ElasticTrainer, transformers.Trainer):
    """Takes the place of ``transformers.Trainer``."""


class _Stepped(Optimizer):
    """The optimizer of the trainer, whose step the job has made."""

    def step(self, *arguments, **options):
        """Nothing is left to do."""


class _Counters(transformers.TrainerCallback):
    def __init__(self, trainer):
        self._trainer = trainer

    def on_step_end(self, args, state, control, **_):
        """The trainer has counted what it has seen: not the steps before the worker joined, and not
        those without records of this worker."""
        self._trainer._note()

    on_epoch_end = on_step_end


class _Printer(transformers.TrainerCallback):
    def __init__(self, job):
        self._job = job

    def on_log(self, args, state, control, logs=None, **_):
        """Prints what the trainer logs."""
        self._job.print(logs)
