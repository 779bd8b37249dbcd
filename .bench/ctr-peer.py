"""The model and the data of the example `ctr` in PyTorch, for comparison:

    ctr-peer.py PROCESSES BATCH RECORDS    prints records/s

One process is a plain loop; several are DistributedDataParallel with gloo, a batch each. Gradients
of rows are sparse. PyTorch has no row-wise Adagrad, so the rows have the element-wise one.
"""

import sys
import time

import numpy as np
import torch
from torch import nn

SEED, IDS = np.uint64(1), 100_000
DENSE, CATEGORIES, DIM, HIDDEN = 13, 26, 16, 32
COUNTS = 1e3 * (IDS / 1e3) ** (np.arange(CATEGORIES) / (CATEGORIES - 1))
OFFSETS = np.concatenate([[0], np.cumsum(COUNTS.astype(np.int64) + 1)])


def mix(number):
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


def uniform(state, draw):
    state = state + np.uint64(draw) * np.uint64(0x9E3779B97F4A7C15)
    return (mix(state) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


def weight(column, ids):
    column = np.full_like(ids, column)
    return uniform(mix(SEED ^ mix(column ^ mix(ids))), 1) * 2 - 1


def clicks(records):
    """Labels, numbers and rows of these records: the generator of `ctr`."""
    state = mix(SEED ^ mix(records.astype(np.uint64)))
    dense = np.stack([uniform(state, 1 + i) * 2 - 1 for i in range(DENSE)], 1)
    exponent = 1 - 1.1
    logit = np.full(len(records), -1.0, np.float32)
    zero = np.zeros(len(records), np.uint64)
    for i in range(DENSE):
        logit += dense[:, i] * weight(i, zero) * 0.4
    ids = []
    for i in range(CATEGORIES):
        draw = uniform(state, 1 + DENSE + i).astype(np.float64)
        rank = (1 + draw * (COUNTS[i] ** exponent - 1)) ** (1 / exponent)
        ids.append(rank.astype(np.uint64))
        logit += weight(100 + i, ids[i]) * 0.5
    for a, b in [(0, 1), (2, 3), (4, 5)]:
        logit += weight(200 + a, ids[a]) * weight(200 + b, ids[b])
    labels = uniform(state, 1 + DENSE + CATEGORIES) < 1 / (1 + np.exp(-logit))
    rows = np.stack(ids, 1).astype(np.int64) + OFFSETS[:-1]
    return [torch.from_numpy(a) for a in (labels.astype(np.float32), dense, rows)]


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        rows = int(OFFSETS[-1])
        self.wide = nn.EmbeddingBag(rows, 1, mode="sum", sparse=True)
        self.deep = nn.Embedding(rows, DIM, sparse=True)
        self.hidden = nn.Linear(DENSE + CATEGORIES * DIM, HIDDEN)
        self.output = nn.Linear(HIDDEN, 1)

    def forward(self, dense, rows):
        inputs = torch.cat([dense, self.deep(rows).flatten(1)], 1)
        return (self.output(torch.relu(self.hidden(inputs))) + self.wide(rows)).squeeze(1)


def train(rank, processes, batch, records):
    # Numbers of 64 bits wrap, as they do in Rust.
    np.seterr(over="ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = WideAndDeep()
    if processes > 1:
        torch.distributed.init_process_group(
            "gloo", init_method="tcp://127.0.0.1:29517", rank=rank, world_size=processes
        )
    rows = [*model.wide.parameters(), *model.deep.parameters()]
    rest = [*model.hidden.parameters(), *model.output.parameters()]
    optimizers = [torch.optim.Adagrad(rows, 0.05), torch.optim.Adam(rest, 0.001)]
    if processes > 1:
        model = nn.parallel.DistributedDataParallel(model)
    started = None
    step = batch * processes
    trained = 0
    for start in range(0, records - step + 1, step):
        # The first steps set up what later ones use.
        if trained == 5 * step:
            started = time.perf_counter()
        labels, dense, ids = clicks(np.arange(start, start + batch) + rank * batch)
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        trained += step
    if rank == 0:
        print((trained - 5 * step) / (time.perf_counter() - started))
    if processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[1:]]
    if arguments[0] == 1:
        train(0, *arguments)
    else:
        torch.multiprocessing.spawn(train, arguments, arguments[0])
