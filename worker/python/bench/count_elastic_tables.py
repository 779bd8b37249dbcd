"""Counts records in embedding tables under kills, with elasticdl."""

import sys

import torch

import elasticdl.torch as et
from progress import RECORDS_PER_STEP, log_step
from workload import DIM, ROWS, TABLES, CountsInTables

NAMES = [f"counts-{table}" for table in range(TABLES)]


class Tables(torch.nn.Module):
    def __init__(self, job):
        super().__init__()
        options = {"optimizer": et.RowSGD(lr=1.0), "bound": 0.0}
        self.tables = torch.nn.ModuleList(job.embedding(name, DIM, **options) for name in NAMES)

    def forward(self, ids):
        return torch.stack([table(ids) for table in self.tables], 1)


def ids(indices):
    return dict.fromkeys(NAMES, torch.tensor(indices) % ROWS)


records, micro_batch = int(sys.argv[1]), int(sys.argv[3])
job = et.join()
net = job.model(CountsInTables(records, Tables(job)))
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=1.0))
for indices in job.batches(job.sampler(records, micro_batch=micro_batch), ids):
    # A gradient is the mean over the records of the step, and the last step has fewer.
    of_step = min(RECORDS_PER_STEP, records - job.step * RECORDS_PER_STEP)
    loss = net(torch.tensor(indices)) * of_step / len(indices)
    loss.backward()
    if opt.step(loss.detach()):
        log_step(sys.argv[2], job.step, job.world_size)
