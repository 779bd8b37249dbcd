"""A program that goes on after its loop, for the tests of whole jobs: ``after_loop.py FOLDER
SECONDS``. All workers test for so long, and the main one then saves a file."""

import pathlib
import sys
import time

import torch

import elasticdl.torch as et

folder, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
job = et.join()
net = job.model(torch.nn.Linear(2, 1))
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
job.print("two\nlines")
sampler = job.sampler(96, micro_batch=8)
for _ in job.epochs():
    for indices in sampler:
        net(torch.ones(len(indices), 2)).mean().backward()
        opt.step()
print("not for the console")
job.print("loss", 0.5, sep=": ")
time.sleep(seconds)
if job.is_main:
    torch.save(net.state_dict(), folder / "final.pt")
elif seconds < 10:
    raise SystemExit(3)
