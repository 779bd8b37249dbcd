"""A PyTorch program for a job with --deterministic, with micro-batches below the job's:
``strict.py means|dropout|rows SECONDS``."""

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
users = torch.randint(40, (300, 3))
if sys.argv[1] == "rows":
    rows = job.embedding_bag("user", 12, optimizer=et.RowAdam(lr=0.01))
    net = torch.nn.ModuleDict({"rows": rows, "net": net})
job.model(net)
opt = job.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
batches = job.sampler(len(x), micro_batch=3)
if sys.argv[1] == "rows":
    batches = job.batches(batches, lambda indices: {"user": users[indices]})
for _ in job.epochs():
    for indices in batches:
        if sys.argv[1] == "rows":
            found = net["net"](x[indices] + net["rows"](users[indices]))
        else:
            found = net(x[indices])
        loss = torch.nn.functional.cross_entropy(found, y[indices])
        loss.backward()
        time.sleep(float(sys.argv[2]))
        opt.step(loss)
