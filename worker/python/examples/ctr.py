"""A model that predicts clicks: the example `ctr` in PyTorch, on the same data.

    elasticdl train --local --num-workers 3 --training-data clicks:0..200000 \\
        --validation-data clicks:1000000..1010000 --global-batch-size 1024 \\
        -- python worker/python/examples/ctr.py

Wide and deep (Cheng et al., 2016): a weight per category, and a network over the categories'
embeddings and the numbers. It needs NumPy.
"""

import torch
from clicks import CATEGORIES, DENSE, clicks
from torch import nn
from torch.utils.data import DataLoader

import elasticdl.torch as et

DIM, HIDDEN = 16, 32


class Clicks(torch.utils.data.Dataset):
    """``clicks:FROM..TO``: generated records of these numbers."""

    def __init__(self, source):
        start, _, end = source.removeprefix("clicks:").partition("..")
        self.start, self.length = int(start), int(end) - int(start)

    def __len__(self):
        return self.length

    def __getitems__(self, indices):
        """Labels, numbers and ids: a whole batch, which needs no collation."""
        return [torch.from_numpy(part) for part in clicks([self.start + i for i in indices])]

    def __getitem__(self, index):
        return [part[0] for part in self.__getitems__([index])]


class WideAndDeep(nn.Module):
    def __init__(self, job):
        super().__init__()
        adagrad = et.RowAdagrad(lr=0.05)
        self.wide = job.embedding_bag("wide", 1, mode="sum", optimizer=adagrad)
        self.deep = job.embedding("deep", DIM, optimizer=adagrad)
        self.hidden = nn.Linear(DENSE + CATEGORIES * DIM, HIDDEN)
        self.output = nn.Linear(HIDDEN, 1)

    def forward(self, dense, ids):
        rows = keys(ids)
        inputs = torch.cat([dense, self.deep(rows).flatten(1)], 1)
        return (self.output(torch.relu(self.hidden(inputs))) + self.wide(rows))[:, 0]


def keys(ids):
    """One table holds all categories: the upper bits of a key are the category."""
    return ids | torch.arange(CATEGORIES) << 56


def ids_of(batch):
    _, _, ids = batch
    return {"wide": keys(ids), "deep": keys(ids)}


torch.manual_seed(0)
job = et.join()
model = job.model(WideAndDeep(job))
opt = job.optimizer(torch.optim.Adam(model.parameters(), 0.001))
criterion = nn.functional.binary_cross_entropy_with_logits

evaluated = job.data if job.work == "evaluate" else job.validation_data
if evaluated is not None:

    @job.evaluator(Clicks(evaluated), micro_batch=1000, ids=ids_of)
    def evaluate(label, dense, ids):
        logit = model(dense, ids)
        return {"loss": criterion(logit, label), "accuracy": (logit > 0) == (label > 0)}


training = Clicks(job.data or "clicks:0..20000")
sampler = job.sampler(len(training), micro_batch=256)
loader = DataLoader(training, batch_sampler=sampler, collate_fn=lambda batch: batch, num_workers=2)
for _ in job.epochs():
    for label, dense, ids in job.batches(loader, ids_of):
        loss = criterion(model(dense, ids), label)
        loss.backward()
        opt.step(loss)
        opt.zero_grad()
print(f"{job.records} clicks in {job.step} steps")
