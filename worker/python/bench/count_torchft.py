"""Counts records under kills, with torchft: one replica group of one process.

Replica ``r`` computes the ``r``-th part of each step, so what a restarted one has missed is not
repeated. The sum of the replicas that take part is applied.
"""

import datetime
import os
import pathlib
import sys
import time

import torch
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo

from progress import log_step
from workload import Counts

records, path, batch = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
replica, size, first = map(int, sys.argv[4:7])
net = Counts(records)
inner = torch.optim.SGD(net.parameters(), lr=1.0)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
    load_state_dict=lambda state: net.load_state_dict(state["model"]),
    state_dict=lambda: {"model": net.state_dict()},
    min_replica_size=1,
    use_async_quorum=False,
    timeout=datetime.timedelta(seconds=10),
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    lighthouse_addr=sys.argv[7],
    replica_id=f"replica-{replica}",
    hostname="127.0.0.1",
)
opt = Optimizer(manager, inner)
order = torch.randperm(records, generator=torch.Generator().manual_seed(0))
share = batch // size
# No replica begins before all replicas have started; those that restart need not wait.
pathlib.Path(f"{path}.{replica}").touch()
while not all(os.path.exists(f"{path}.{each}") for each in range(first)):
    time.sleep(0.02)
while True:
    opt.zero_grad()
    step = manager.current_step()
    start = step * batch + replica * share
    indices = order[start : start + share]
    if step * batch >= records:
        break
    # The gradient is a mean over the replicas that take part. DistributedDataParallel of torchft
    # 0.2.0 ends the process of a survivor (`assert fut._fut`), so the sums are called for here.
    (net(indices) * manager.num_participants()).backward()
    sums = [manager.allreduce(parameter.grad) for parameter in net.parameters()]
    for each in sums:
        each.wait()
    opt.step()
    if manager.current_step() > step:
        log_step(path, step + 1, manager.num_participants())
if manager.participating_rank() == 0:
    net.write(path)
# Its threads would wait.
os._exit(0)
