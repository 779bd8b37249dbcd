"""A program that writes into files what it finds after each epoch's loop, for the tests of whole
jobs: ``between_epochs.py FOLDER``. Only one worker computes in each step."""

import os
import pathlib
import sys
import time

import torch

import elasticdl.torch as et

job = et.join()
net = job.model(torch.nn.Linear(2, 1))
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01))
sampler = job.sampler(40, micro_batch=8)
found = []
for epoch in job.epochs():
    for indices in sampler:
        net(torch.ones(len(indices), 2)).square().mean().backward()
        opt.step()
    before = job.step, net.weight.tolist()
    time.sleep(0.005)
    found.append((epoch, *before, before == (job.step, net.weight.tolist())))
pathlib.Path(sys.argv[1], f"found-{os.getpid()}").write_text(repr(found))
