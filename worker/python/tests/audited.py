"""A PyTorch program for jobs with --audit: ``audited.py NET FAULT SECONDS LOADERS``.

``NET``: ``plain``, with random numbers of its records; ``norm``, with those of global generators,
BatchNorm, bfloat16 and a GradScaler. ``FAULT``: the second launch ``flips`` a bit of one gradient,
or ``keeps`` flipping it; ``carries``: what is computed depends on the batches before; ``own``: on
the process; ``none``.
"""

import os
import random
import sys
import time

import numpy
import torch
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.torch as et

norm, fault, seconds, loaders = sys.argv[1] == "norm", sys.argv[2], *map(float, sys.argv[3:])
torch.set_num_threads(1)
torch.manual_seed(3)
data = TensorDataset(torch.randn(480, 12), torch.randint(3, (480,)))
middle = [torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2)] if norm else [et.Dropout(0.2)]
net = torch.nn.Sequential(torch.nn.Linear(12, 16), *middle, torch.nn.ReLU(), torch.nn.Linear(16, 3))
job = et.join()
job.model(net)
opt = job.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01), clip_norm=1.0)
scaler = job.scaler(torch.amp.GradScaler("cpu", enabled=norm))
batches = job.sampler(len(data), micro_batch=5)
is_faulty = fault in ("flips", "keeps") and os.environ["ELASTICDL_LAUNCH"] == "2"
factor = 1 + os.getpid() / 1e6 if fault == "own" else 1.0
for _ in job.epochs():
    for x, y in DataLoader(data, batch_sampler=batches, num_workers=int(loaders)):
        if norm:
            noise = torch.from_numpy(numpy.random.standard_normal(x.shape)).float()
            x = x + noise * random.random()
        with torch.autocast("cpu", torch.bfloat16, enabled=norm):
            found = net(x)
        loss = factor * torch.nn.functional.cross_entropy(found.float(), y)
        factor += 0.01 * (fault == "carries")
        scaler.scale(loss).backward()
        if is_faulty and job.step >= 5:
            net[0].weight.grad.numpy().view(numpy.int32)[3, 4] ^= 1 << 20
            is_faulty = fault == "keeps"
        time.sleep(seconds)
        scaler.step(opt, loss)
        scaler.update()
        opt.zero_grad()
