"""One member of a process group that is formed three times: a, b and c; without b, which is killed;
and with d. Arguments: its name, and the port of a store for the handles."""

import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReconfigureOptions
from torch.nn.parallel import DistributedDataParallel

from elasticdl.torch.distributed import ElasticProcessGroup

name, port = sys.argv[1], int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
limit = datetime.timedelta(seconds=60)
group = ElasticProcessGroup("127.0.0.1", limit)


def form(uuid, members, make=list):
    """Forms the group of these members."""
    store.set(f"{uuid}/{name}", group.get_reconfigure_handle())
    options = ReconfigureOptions()
    options.uuid = uuid
    options.handles = make(store.get(f"{uuid}/{member}").decode() for member in members)
    assert group.reconfigure(options).wait()


def refused(act, expected):
    """Whether this fails with such an error."""
    try:
        act()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        assert expected in str(error), error
    else:
        raise AssertionError(expected)


def summed():
    """The number of members, by an all-reduce."""
    ones = torch.ones(1000)
    dist.all_reduce(ones, group=group)
    assert bool((ones == ones[0]).all())
    return int(ones[0])


assert dist._supports_reconfigure(group)
assert (group.rank(), group.size()) == (-1, -1)
refused(summed, "call reconfigure()")
refused(lambda: group.send([torch.ones(1)], 0, 0), "no send")
if name != "d":
    form(1, "abc")
    assert (group.rank(), group.size()) == ("abc".index(name), 3)
    assert summed() == 3
    refused(lambda: form(1, "abc"), "had the uuid 1")
    store.set("1/x", "127.0.0.1:9/x")
    refused(lambda: form(1, "x"), "lack that of this member")
    if name == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    kept = torch.full((1000,), 5.0)
    refused(lambda: [dist.all_reduce(kept, group=group) for _ in range(2)], "")
    assert bool((kept == 5.0).all())
    # The group determines the ranks.
    form(2, "ac", set)
    assert group.size() == 2 and summed() == 2
form(3, "dac")
assert (group.rank(), group.size()) == ("dac".index(name), 3)
assert summed() == 3
# DDP copies the parameters of rank 0 and averages gradients.
torch.manual_seed("abcd".index(name))
net = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    opt.step()
flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
parts = [torch.empty_like(flat) for _ in range(3)]
dist.all_gather(parts, flat, group=group)
assert all(torch.equal(part, flat) for part in parts), parts
dist.barrier(group=group)
print("passed", name)
