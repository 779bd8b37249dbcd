"""A PyTorch program for jobs with --deterministic whose optimizer has two groups of parameters:
``groups.py SECONDS FILE RATE WHICH...``, with the numbers of the groups in order. Each worker gives
the parameters of a group in an order of its own, as a set does."""

import random
import sys
import time

import torch

import elasticdl.torch as et

torch.set_num_threads(1)
torch.manual_seed(3)
x, y = torch.randn(60, 6), torch.randint(3, (60,))
net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
parameters = list(net.parameters())
groups = [
    {"params": parameters[::2], "weight_decay": 0.1},
    {"params": parameters[1::2], "weight_decay": 0.0},
]
for group in groups:
    random.SystemRandom().shuffle(group["params"])
job = et.join()
job.model(net)
inner = torch.optim.Adam([groups[int(at)] for at in sys.argv[4:]], lr=float(sys.argv[3]))
opt = job.optimizer(inner)
sampler = job.sampler(len(x), micro_batch=3)
for _ in job.epochs():
    for indices in sampler:
        loss = torch.nn.functional.cross_entropy(net(x[indices]), y[indices])
        loss.backward()
        time.sleep(float(sys.argv[1]))
        opt.step(loss)
with open(sys.argv[2], "a") as file:
    values = [value.tolist() for value in net.state_dict().values()]
    # The state of the optimizer, by the module's order.
    values += [inner.state[parameter]["exp_avg_sq"].tolist() for parameter in parameters]
    file.write(f"{[group['lr'] for group in opt.param_groups]} {values}\n")
