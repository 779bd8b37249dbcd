"""Counts records under kills, with elasticdl."""

import sys

import torch

import elasticdl.torch as et
from progress import log_step
from workload import Counts

records, path, micro_batch = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
job = et.join()
net = job.model(Counts(records))
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=1.0), reduction="sum")
for indices in job.sampler(records, micro_batch=micro_batch):
    loss = net(torch.tensor(indices))
    loss.backward()
    if opt.step(loss.detach() / len(indices)):
        log_step(path, job.step, job.world_size)
net.write(path)
