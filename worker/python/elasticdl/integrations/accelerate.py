"""The ``Accelerator`` of accelerate, whose loop the workers of a job divide.

::

    from elasticdl.integrations.accelerate import Accelerator     # in place of that of accelerate

    accelerator = Accelerator(epochs=3, clip_norm=1.0)
    model, optimizer, data, test, scheduler = accelerator.prepare(
        model, optimizer, data, test, scheduler
    )
    for epoch in accelerator.epochs():
        for batch in data:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""

import functools

import accelerate
import torch
from accelerate.utils import DistributedType, send_to_device
from torch.utils.data import DataLoader

from ..torch import Optimizer, join
from ._common import BF16, ELASTICDL_TRAIN, RESUMES, refuse, refused, training_loader, use_device

use_device()


class Accelerator(accelerate.Accelerator):
    """Takes the place of ``accelerate.Accelerator``."""

    def __init__(self, *, job=None, epochs=1, seed=0, clip_norm=None, **options):
        """``job``: what ``elasticdl.torch.join()`` has returned. Default: joins. ``epochs``,
        ``seed``: without a master; otherwise, those of the job. ``clip_norm``: maximum norm of a
        step's gradient. ``options``: of the base class.
        """
        self.job = join() if job is None else job
        self._order = {"epochs": epochs, "seed": seed}
        self._clip_norm = clip_norm
        self._has_data = False
        self._delivered = None, None
        super().__init__(**options)
        refuse(
            (self.distributed_type != DistributedType.NO, "a distributed mode", ELASTICDL_TRAIN),
            (self.scaler is not None, "fp16", BF16),
        )
        # The job accumulates.
        self._micro_batches, self.gradient_accumulation_steps = self.gradient_accumulation_steps, 1

    def prepare(self, *objects, **options):
        """As that of the base class. The first loader has the records to train on, in the job's
        order; the batches of further ones are divided for :meth:`gather_for_metrics`."""
        del options
        # The module's device is that of its optimizer.
        prepared = {
            id(each): self.prepare_model(each)
            for each in objects
            if isinstance(each, torch.nn.Module)
        }
        for each in objects:
            if isinstance(each, DataLoader):
                prepared[id(each)] = self.prepare_data_loader(each)
            elif isinstance(each, torch.optim.Optimizer):
                prepared[id(each)] = self.prepare_optimizer(each)
        found = tuple(prepared.get(id(each), each) for each in objects)
        return found if len(found) > 1 else found[0]

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        """Declares the module to the job."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if not evaluation_mode:
            self.job.model(model)
        return prepared

    def prepare_optimizer(self, optimizer, device_placement=None):
        """Declares the optimizer to the job."""
        del device_placement
        mine = self.job.optimizer(optimizer, clip_norm=self._clip_norm)
        mine.__class__, mine.accelerator = _Optimizer, self
        return mine

    def prepare_data_loader(self, data_loader, device_placement=None, slice_fn_for_dispatch=None):
        """Divides the batches of a loader."""
        del device_placement, slice_fn_for_dispatch
        if self._has_data:
            return _OnDevice(self.job.divided(data_loader), self.device)
        loader = training_loader(self.job, data_loader, self._micro_batches, **self._order)
        self._has_data = True
        return _OnDevice(loader, self.device)

    def prepare_scheduler(self, scheduler):
        """A scheduler of the optimizer steps with the steps of the job."""
        return scheduler

    def epochs(self):
        """The epochs of the job, in the place of ``range(epochs)``: see ``Job.epochs()``."""
        return self.job.epochs()

    def backward(self, loss, *, weight=None, **options):
        """As that of the base class. ``weight``: see ``Optimizer.step()`` of the job."""
        self._delivered = loss.detach(), weight
        super().backward(loss, **options)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """The optimizer clips the gradient of the step, whose norm is not known here."""
        refuse(
            (
                max_norm != self._clip_norm or norm_type != 2,
                f"clip_grad_norm_({max_norm})",
                f"all workers clip a step's gradient: say Accelerator(clip_norm={max_norm})",
            )
        )

    def gather_for_metrics(self, input_data, use_gather_object=False):
        """See ``Job.gather_for_metrics()``: called once for each batch, with all of its values."""
        refuse((use_gather_object, "use_gather_object", "gather tensors"))
        return self.job.gather_for_metrics(input_data)

    # ---- what one worker does ----

    @property
    def is_main_process(self):
        """Whether this worker is the main one, which another one becomes if it is lost."""
        return self.job._acts_for_all()

    is_local_main_process = is_main_process

    def on_main_process(self, function=None):
        """As that of the base class."""
        if function is None:
            return self.on_main_process

        @functools.wraps(function)
        def on_main(*arguments, **options):
            return function(*arguments, **options) if self.is_main_process else None

        return on_main

    on_local_main_process = on_main_process

    def print(self, *arguments, **options):
        """See ``Job.print()``."""
        self.job.print(*arguments, **options)

    def save(self, *arguments, **options):
        """Saves on the main worker."""
        self.on_main_process(super().save)(*arguments, **options)

    def save_model(self, *arguments, **options):
        """Saves on the main worker."""
        self.on_main_process(super().save_model)(*arguments, **options)

    def get_state_dict(self, model, unwrap=True):
        """As that of the base class, with copies: parameters are parts of one memory, of which
        accelerate would save one."""
        copies = {}
        state = super().get_state_dict(model, unwrap)
        for name, value in state.items():
            # Those that are tied stay so.
            state[name] = copies.setdefault(value.data_ptr(), value.detach().clone())
        return state

    def init_trackers(self, *arguments, **options):
        """Starts trackers on the main worker."""
        self.on_main_process(super().init_trackers)(*arguments, **options)

    load_state = skip_first_batches = save_state = refused(
        "save_state(), load_state() and skip_first_batches()",
        RESUMES,
    )
    gather = reduce = refused(
        "gather() and reduce()",
        "use gather_for_metrics() in a loop over a prepared loader, and job.report() for a mean",
    )
    clip_grad_value_ = refused("clip_grad_value_()", "use clip_norm of Accelerator()")


class _Optimizer(Optimizer):
    """The optimizer of a job, for a loop that does not give its step the loss."""

    def step(self, closure=None):
        """Delivers a micro-batch. Returns whether a step was committed."""
        refuse((closure is not None, "a closure", "call accelerator.backward() before step()"))
        loss, weight = self.accelerator._delivered
        return super().step(loss, weight=weight)


class _OnDevice:
    """The batches of a loader, on the device of this worker."""

    def __init__(self, loader, device):
        self._loader, self._device = loader, device
        self.dataset = loader.dataset

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        for batch in self._loader:
            yield send_to_device(batch, self._device)
