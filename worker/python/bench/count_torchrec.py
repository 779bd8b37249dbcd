"""Counts records in embedding tables under kills, with TorchRec and a checkpoint every few steps.

On CPUs its planner gives each table to one of the workers. All start again after the loss of one.
"""

import datetime
import os
import pathlib
import shutil
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DistributedSampler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from progress import log_step
from workload import DIM, ROWS, TABLES, CountsInTables, write_worst_counts


class Tables(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = [f"id-{table}" for table in range(TABLES)]
        configs = [
            EmbeddingBagConfig(
                name=f"counts-{table}",
                num_embeddings=ROWS,
                embedding_dim=DIM,
                feature_names=[key],
                init_fn=torch.nn.init.zeros_,
            )
            for table, key in enumerate(self.keys)
        ]
        self.bags = EmbeddingBagCollection(configs, device=torch.device("meta"))

    def forward(self, ids):
        lengths = torch.ones(TABLES * len(ids), dtype=torch.int64)
        features = KeyedJaggedTensor(self.keys, ids.repeat(TABLES), lengths=lengths)
        return self.bags(features).values().view(len(ids), TABLES, DIM)


records, path, batch, every = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
size = dist.get_world_size()
net, start = CountsInTables(records, Tables()), 0
_apply_optimizer_in_backward(torch.optim.SGD, net.tables.parameters(), {"lr": float(size)})
model = DistributedModelParallel(net, device=torch.device("cpu"))
opt = torch.optim.SGD([net.counts], lr=float(size))
# A checkpoint is complete when it has this file.
complete = pathlib.Path(path).parent.glob("checkpoint-*/.metadata")
saved = max((int(file.parent.name.split("-")[1]) for file in complete), default=None)
if saved is not None:
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=pathlib.Path(path).with_name(f"checkpoint-{saved}"))
    model.load_state_dict(state["model"])
    start = saved
order = list(DistributedSampler(range(records), shuffle=True, drop_last=False))
share = batch // size
for step in range(start, -(-len(order) // share)):
    model(torch.tensor(order[step * share : (step + 1) * share])).backward()
    opt.step()
    opt.zero_grad()
    log_step(path, step + 1, size)
    if (step + 1) % every == 0:
        new = pathlib.Path(path).with_name(f"checkpoint-{step + 1}")
        dcp.save({"model": model.state_dict()}, checkpoint_id=new)
        if dist.get_rank() == 0:
            for old in new.parent.glob("checkpoint-*"):
                if old != new:
                    shutil.rmtree(old)
tables = []
for value in model.state_dict().values():
    if isinstance(value, ShardedTensor):
        tables.append(torch.empty(ROWS, DIM) if dist.get_rank() == 0 else None)
        value.gather(0, tables[-1])
if dist.get_rank() == 0:
    write_worst_counts(path, net.counts.detach(), tables)
dist.destroy_process_group()
