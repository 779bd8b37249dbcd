"""The model and the data of the example `ctr` in PyTorch, for comparison:

    ctr-peer.py PROCESSES BATCH RECORDS    prints records/s

One process is a plain loop; several are DistributedDataParallel with gloo, a batch each. Gradients
of rows are sparse. PyTorch has no row-wise Adagrad, so the rows have the element-wise one.
"""

import pathlib
import sys
import time

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "worker/python/examples"))
from clicks import CATEGORIES, COUNTS, DENSE, clicks  # noqa: E402

DIM, HIDDEN = 16, 32
OFFSETS = np.concatenate([[0], np.cumsum(COUNTS.astype(np.int64) + 1)])


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
        found = clicks(np.arange(start, start + batch) + rank * batch)
        labels, dense, ids = (torch.from_numpy(part) for part in found)
        rows = ids + torch.from_numpy(OFFSETS[:-1])
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, rows), labels)
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
