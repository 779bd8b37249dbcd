"""The model and the data of the example `ctr` in PyTorch, for comparison:

    ctr-peer.py PEER PROCESSES BATCH RECORDS    prints records/s

PEER `ddp`: one process is a plain loop, several are DistributedDataParallel with gloo, a batch
each. Gradients of rows are sparse. PyTorch has no row-wise Adagrad, so the rows have the
element-wise one.

PEER `torchrec`: the tables are spread over the processes as TorchRec's planner decides, and its
fused row-wise Adagrad updates them. One table for each category holds the rows of both parts.

The records are made before the time begins.
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
ROWS = COUNTS.astype(np.int64) + 1
OFFSETS = np.concatenate([[0], np.cumsum(ROWS)])
# Numbers of a row of both parts, and of the kernel's padding.
BOTH = DIM + 4
UNTIMED_STEPS = 5


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        rows = int(OFFSETS[-1])
        self.wide = nn.EmbeddingBag(rows, 1, mode="sum", sparse=True)
        self.deep = nn.Embedding(rows, DIM, sparse=True)
        self.hidden = nn.Linear(DENSE + CATEGORIES * DIM, HIDDEN)
        self.output = nn.Linear(HIDDEN, 1)

    def forward(self, dense, ids):
        rows = ids + torch.from_numpy(OFFSETS[:-1])
        inputs = torch.cat([dense, self.deep(rows).flatten(1)], 1)
        return (self.output(torch.relu(self.hidden(inputs))) + self.wide(rows)).squeeze(1)


def distributed_data_parallel(processes):
    model = WideAndDeep()
    rows = [*model.wide.parameters(), *model.deep.parameters()]
    rest = [*model.hidden.parameters(), *model.output.parameters()]
    optimizers = [torch.optim.Adagrad(rows, 0.05), torch.optim.Adam(rest, 0.001)]
    return nn.parallel.DistributedDataParallel(model) if processes > 1 else model, optimizers


def torchrec(_processes):
    import torchrec
    from torch.distributed.optim import _apply_optimizer_in_backward as fused
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    names = [f"category-{i}" for i in range(CATEGORIES)]

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = torchrec.EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    torchrec.EmbeddingBagConfig(
                        num_embeddings=rows, embedding_dim=BOTH, name=name, feature_names=[name]
                    )
                    for name, rows in zip(names, ROWS.tolist())
                ],
            )
            self.hidden = nn.Linear(DENSE + CATEGORIES * DIM, HIDDEN)
            self.output = nn.Linear(HIDDEN, 1)

        def forward(self, dense, ids):
            ids = torchrec.KeyedJaggedTensor(
                keys=names,
                values=ids.t().flatten(),
                lengths=torch.ones(ids.numel(), dtype=torch.int64),
            )
            rows = self.rows(ids).values().view(len(dense), CATEGORIES, BOTH)
            inputs = torch.cat([dense, rows[:, :, :DIM].flatten(1)], 1)
            wide = rows[:, :, DIM].sum(1)
            return self.output(torch.relu(self.hidden(inputs))).squeeze(1) + wide

    model = Rows()
    fused(RowWiseAdagrad, model.rows.parameters(), {"lr": 0.05})
    group = torch.distributed.group.WORLD
    planner = EmbeddingShardingPlanner(Topology(group.size(), compute_device="cpu"))
    sharders = [torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder()]
    model = torchrec.distributed.DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=planner.collective_plan(model, sharders, group),
        sharders=sharders,
    )
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, [KeyedOptimizerWrapper(rest, lambda them: torch.optim.Adam(them, 0.001))]


def train(rank, peer, processes, batch, records):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if processes > 1 or peer is torchrec:
        torch.distributed.init_process_group(
            "gloo", init_method="tcp://127.0.0.1:29517", rank=rank, world_size=processes
        )
    model, optimizers = peer(processes)
    step = batch * processes
    batches = [
        [torch.from_numpy(part) for part in clicks(np.arange(start, start + batch) + rank * batch)]
        for start in range(0, records - step + 1, step)
    ]
    for count, (labels, dense, ids) in enumerate(batches):
        # The first steps set up what later ones use.
        if count == UNTIMED_STEPS:
            started = time.perf_counter()
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    if rank == 0:
        print((len(batches) - UNTIMED_STEPS) * step / (time.perf_counter() - started))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


PEERS = {"ddp": distributed_data_parallel, "torchrec": torchrec}

if __name__ == "__main__":
    peer = PEERS[sys.argv[1]]
    arguments = [int(word) for word in sys.argv[2:]]
    if arguments[0] == 1:
        train(0, peer, *arguments)
    else:
        torch.multiprocessing.spawn(train, (peer, *arguments), arguments[0])
