"""Counts records under kills, with torchrun and a checkpoint every few steps."""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from progress import log_step
from workload import Counts

records, path, batch, every = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
size = dist.get_world_size()
net, start = Counts(records), 0
if os.path.exists(path + ".checkpoint"):
    saved = torch.load(path + ".checkpoint")
    net.load_state_dict(saved["model"])
    start = saved["step"]
model = DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=float(size))
order = list(DistributedSampler(range(records), shuffle=True, drop_last=False))
share = batch // size
for step in range(start, -(-len(order) // share)):
    indices = torch.tensor(order[step * share : (step + 1) * share])
    model(indices).backward()
    opt.step()
    opt.zero_grad()
    log_step(path, step + 1, size)
    if (step + 1) % every == 0 and dist.get_rank() == 0:
        state = {"model": net.state_dict(), "step": step + 1}
        torch.save(state, path + ".new")
        os.replace(path + ".new", path + ".checkpoint")
if dist.get_rank() == 0:
    net.write(path)
dist.destroy_process_group()
