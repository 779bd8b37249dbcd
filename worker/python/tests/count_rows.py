"""A PyTorch program whose rows count touches, for the tests of whole jobs.

With SGD and a rate of 1, each of a record's ids adds 1 to the elements of its row: row ``i`` of the
table "user" counts the records with user ``i``, and "word" counts those with word ``i``.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader

import elasticdl.torch as et

records, batch, micros, loaders = (int(argument) for argument in sys.argv[1:5])
USERS, WORDS = 40, 25


class Clicks(torch.utils.data.Dataset):
    def __len__(self):
        return records

    def __getitem__(self, index):
        return index * index % USERS, [(index + word) % WORDS for word in range(index % 4)]


class All(torch.utils.data.Dataset):
    """Each user and each word once."""

    def __len__(self):
        return USERS

    def __getitem__(self, index):
        return index, [index % WORDS]


def collate(clicks):
    users, words = zip(*clicks)
    starts = [0]
    for of_record in words[:-1]:
        starts.append(starts[-1] + len(of_record))
    flat = torch.tensor([word for of_record in words for word in of_record], dtype=torch.int64)
    return torch.tensor(users), flat, torch.tensor(starts)


def ids(batch):
    users, words, starts = batch
    return {"user": users, "word": (words, starts)}


class Counts(torch.nn.Module):
    def __init__(self, job):
        super().__init__()
        self.user = job.embedding("user", 2, optimizer=et.RowSGD(lr=1.0), bound=0.0)
        self.word = job.embedding_bag(
            "word", 1, mode="sum", optimizer=et.RowSGD(lr=1.0), bound=0.0
        )
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, users, words, starts):
        return self.user(users).sum(1), self.word(words, starts)[:, 0]


job = et.join()
model = job.model(Counts(job))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))


@job.evaluator(All(), micro_batch=16, collate=collate, ids=ids)
def evaluate(users, words, starts):
    users, words = model(users, words, starts)
    # Not a mean: the worst row of a table is not hidden by others.
    return {"users": users / 2, "squares": (users / 2).square(), "words": words}


@job.predictor(All(), micro_batch=16, collate=collate, ids=ids)
def predict(users, words, starts):
    of_users, of_words = model(users, words, starts)
    return {"user": users, "records": of_users / 2, "word": of_words}


sampler = job.sampler(records, micro_batch=7)
data = DataLoader(Clicks(), batch_sampler=sampler, num_workers=loaders, collate_fn=collate)
for _ in job.epochs():
    for users, words, starts in job.batches(data, ids=ids):
        of_users, of_words = model(users, words, starts)
        loss = -batch * (of_users + of_words + model.bias).mean()
        loss.backward()
        time.sleep(micros * len(users) / 1e6)
        opt.step(loss.detach())
        opt.zero_grad()
print("rows are counted", job.step)
