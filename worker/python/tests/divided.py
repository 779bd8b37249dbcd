"""A model whose workers divide its test, for the tests of whole jobs.

Arguments: a file, to which each worker writes a line for each test: the epoch, the number of
batches that it computed, and whether it got the values of all, as one worker computes them; and the
epoch in whose test the worker of rank 1 kills itself, or -1.
"""

import os
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.torch as et

RECORDS, TESTED, MICRO = 96, 50, 4

path, killed = sys.argv[1], int(sys.argv[2])
random = torch.Generator().manual_seed(3)
x = torch.randn(RECORDS, 5, generator=random)
numbers = torch.arange(TESTED)
torch.manual_seed(1)
net = torch.nn.Linear(5, 2)
job = et.join()
job.model(net)
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01))
data = DataLoader(TensorDataset(x), batch_sampler=job.sampler(RECORDS, micro_batch=16))
test = job.divided(DataLoader(TensorDataset(x[:TESTED], numbers), batch_size=MICRO, num_workers=1))


def run_test(epoch):
    computed, found, means = 0, [], []
    for inputs, number in test:
        if epoch == killed and computed == 2 and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        computed += 1
        scores = net(inputs)
        values = {"all": (scores, number), "mean": scores.mean()}
        gathered = job.gather_for_metrics(values)
        found.append(gathered["all"])
        means.append(gathered["mean"])
    scores, number = (torch.cat(parts) for parts in zip(*found, strict=True))
    expected = [net(x[at : min(at + MICRO, TESTED)]) for at in range(0, TESTED, MICRO)]
    is_right = torch.equal(number, numbers) and torch.equal(scores, torch.cat(expected))
    is_right &= torch.equal(torch.cat(means), torch.stack([part.mean() for part in expected]))
    return f"{epoch} {computed} {is_right}\n"


for epoch in job.epochs():
    for (inputs,) in data:
        net(inputs).square().mean().backward()
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        lines = run_test(epoch)
        if killed < 0:
            # Of the same workers, which meet again.
            lines += run_test(epoch)
    with open(path, "a") as file:
        file.write(lines)
