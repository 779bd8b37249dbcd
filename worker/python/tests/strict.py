"""A PyTorch program for a job with --deterministic, with micro-batches below the job's."""

import sys
import time

import torch

import elasticdl.torch as et

torch.set_num_threads(1)
torch.manual_seed(3)
x, y = torch.randn(300, 12), torch.randint(3, (300,))
middle = [torch.nn.BatchNorm1d(16)] if sys.argv[1] == "means" else [et.Dropout(0.2)]
net = torch.nn.Sequential(torch.nn.Linear(12, 16), *middle, torch.nn.ReLU(), torch.nn.Linear(16, 3))
job = et.join()
job.model(net)
opt = job.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
for indices in job.sampler(len(x), micro_batch=3):
    loss = torch.nn.functional.cross_entropy(net(x[indices]), y[indices])
    loss.backward()
    time.sleep(float(sys.argv[2]))
    opt.step(loss)
