"""The plain loop, with elasticdl."""

import torch
from torch.utils.data import DataLoader

import elasticdl.torch as et
from workload import RECORDS_PER_STEP, Timer, build

net, data = build()
timer = Timer()
job = et.join()
model = job.model(net)
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01))
loader = DataLoader(data, batch_sampler=job.sampler(len(data), micro_batch=RECORDS_PER_STEP))
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step(loss)
    opt.zero_grad()
    timer.step()
timer.write_rate()
