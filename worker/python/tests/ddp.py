"""One rank of a DDP training, for the tests of the backend. Prints the parameters."""

import sys

import torch
import torch.distributed as dist

if sys.argv[1] == "elasticdl":
    import elasticdl.torch.distributed  # noqa: F401

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
net = torch.nn.Sequential(
    torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Linear(40, 3)
)
# Small buckets, so that there are several.
net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(100)
x, y = torch.randn(8 * size * 10, 12), torch.randint(3, (8 * size * 10,))
for step in range(10):
    mine = slice((step * size + rank) * 8, (step * size + rank + 1) * 8)
    opt.zero_grad()
    torch.nn.functional.cross_entropy(net(x[mine]), y[mine]).backward()
    opt.step()
dist.barrier()
if rank == 0:
    print(*[value for parameter in net.parameters() for value in parameter.flatten().tolist()])
dist.destroy_process_group()
