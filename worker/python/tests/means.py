"""A linear regression whose loss is a mean, for the tests of whole jobs.

The records of a step are one micro-batch of a worker that trains alone. Arguments: microseconds per
record of a worker that is alone, and a file for the parameters; with 0 microseconds it is the plain
loop, in the order of the data.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

RECORDS, BATCH, EPOCHS = 1600, 48, 2

micros, path = int(sys.argv[1]), sys.argv[2]
random = torch.Generator().manual_seed(3)
x = torch.randn(RECORDS, 5, generator=random)
y = x @ torch.randn(5, 2, generator=random) + 0.1 * torch.randn(RECORDS, 2, generator=random)
torch.manual_seed(1)
net = torch.nn.Linear(5, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
if micros:
    import elasticdl.torch as et

    job = et.join()
    net = job.model(net)
    opt = job.optimizer(opt)
    options = {"batch_sampler": job.sampler(RECORDS, micro_batch=BATCH)}
else:
    options = {"batch_size": BATCH}
for _ in job.epochs() if micros else range(EPOCHS):
    for inputs, wanted in DataLoader(TensorDataset(x, y), **options):
        torch.nn.functional.mse_loss(net(inputs), wanted).backward()
        # Until another worker has come.
        time.sleep(micros * len(inputs) / 1e6 if micros and job.world_size == 1 else 0.02)
        opt.step()
        opt.zero_grad()
values = [value for parameter in net.parameters() for value in parameter.flatten().tolist()]
with open(path, "a") as file:
    file.write(" ".join(map(str, values)) + "\n")
