"""A program whose optimizer has several schedulers, for the tests of schedules.

One is a sequence of two, another one multiplies its rate, a third one steps once per epoch, and a
fourth one by a metric. The momentum is set in the loop, by formula, and the optimizer has a state
before training: a momentum of a parameter without gradient, which shows that of each step.
Arguments: microseconds per record, a file, to which the process adds a line: the settings of all
steps, in JSON, and where the third one is stepped: "loop", with a loader that reads ahead, or
"state", by a function of ``job.state()``. ``plain(steps, steps_per_epoch)`` returns those of a
plain loop.
"""

import json
import sys
import time

import torch
from torch.optim import lr_scheduler

RECORDS, BATCH = 600, 48


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.idle = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return super().forward(x) + 0 * self.idle


def build():
    torch.manual_seed(1)
    net = Net()
    groups = [{"params": [net.weight]}, {"params": [net.bias, net.idle], "lr": 0.05}]
    opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    saved = opt.state_dict()
    saved["state"][2] = {"momentum_buffer": torch.tensor([1e9])}
    return net, opt, saved


def schedulers(opt):
    """Those of the steps, that of the epochs, and that of a metric."""
    warmup = lr_scheduler.LinearLR(opt, 0.1, total_iters=5)
    decay = lr_scheduler.CosineAnnealingLR(opt, 40)
    sequence = lr_scheduler.SequentialLR(opt, [warmup, decay], [5])
    factors = lr_scheduler.MultiplicativeLR(opt, lambda step: 0.99 if step % 3 else 1.01)
    plateau = lr_scheduler.ReduceLROnPlateau(opt, factor=0.25, patience=0)
    return [sequence, factors], lr_scheduler.StepLR(opt, 1, 0.5), plateau


def set_momentum(opt, step):
    for group in opt.param_groups:
        group["momentum"] = 0.9 - 0.2 / (step + 1)


def rates_of(net, opt):
    return [opt.state[net.idle]["momentum_buffer"].item(), *(g["lr"] for g in opt.param_groups)]


def plain(steps, steps_per_epoch):
    net, opt, saved = build()
    opt.load_state_dict(saved)
    each, of_epoch, plateau = schedulers(opt)
    rates = []
    for step in range(steps):
        if step and step % steps_per_epoch == 0:
            of_epoch.step()
            plateau.step(1.0)
        set_momentum(opt, step)
        net(torch.ones(1, 3)).sum().backward()
        opt.step()
        rates.append(rates_of(net, opt))
        for scheduler in each:
            scheduler.step()
    return rates


class Rates:
    """The rate of each step, as a part of the group's state."""

    def __init__(self, net, opt):
        self.net, self.opt = net, opt
        self.all = []

    def state_dict(self):
        return {"all": self.all}

    def load_state_dict(self, state):
        self.all = state["all"]

    def add(self):
        self.all.append(rates_of(self.net, self.opt))


def main(micros, path, where, epochs=None):
    import elasticdl.torch as et

    torch.set_num_threads(1)
    job = et.join()
    net, inner, saved = build()
    job.model(net)
    opt = job.optimizer(inner)
    assert isinstance(opt, torch.optim.Optimizer)
    opt.load_state_dict(saved)
    each, of_epoch, plateau = schedulers(opt)
    in_loop = where == "loop"
    if not in_loop:
        job.state("epochs", of_epoch, on_epoch=of_epoch.step)
    rates = Rates(net, inner)
    job.state("rates", rates, on_commit=rates.add)
    order = {} if epochs is None else {"global_batch": BATCH, "epochs": epochs}
    sampler = job.sampler(RECORDS, micro_batch=5, **order)
    options = {"batch_sampler": sampler, "num_workers": 2 if in_loop else 0}
    loader = torch.utils.data.DataLoader(torch.randn(RECORDS, 3), **options)
    assert job.steps == 3 * len(loader) == 39, job.steps
    for _ in job.epochs():
        for x in loader:
            set_momentum(opt, job.step)
            loss = net(x).square().mean()
            loss.backward()
            time.sleep(micros * len(x) / 1e6)
            committed = opt.step(loss)
            opt.zero_grad()
            for scheduler in each:
                # Either way is right.
                if committed or job.step % 2:
                    scheduler.step()
            if committed:
                assert each[0].last_epoch == len(rates.all) == job.step, each[0].last_epoch
        if in_loop:
            of_epoch.step()
        plateau.step(1.0)
    with open(path, "a") as file:
        file.write(json.dumps(rates.all) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
