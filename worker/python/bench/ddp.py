"""The plain loop, with DDP."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import elasticdl.torch.distributed  # noqa: F401
from workload import RECORDS_PER_STEP, Timer, build

net, data = build()
timer = Timer()
dist.init_process_group(sys.argv[3])
model = DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=RECORDS_PER_STEP // dist.get_world_size(), sampler=sampler)
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    timer.step()
timer.write_rate()
# Where a rank ends much earlier than another, gloo may abort the process.
dist.barrier()
dist.destroy_process_group()
