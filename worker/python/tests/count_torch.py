"""A PyTorch program whose parameters count records, for the tests of whole jobs.

Record ``i`` adds 1 to element ``i`` of a parameter and nothing else, with SGD and a rate of 1. The
optimizer's state, a buffer and an object of the program count, too.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader

import elasticdl.torch as et

records, micros, counts, loaders = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return records

    def __getitem__(self, index):
        return index


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(records))
        self.unused = torch.nn.Parameter(torch.full((3,), 7.0))
        self.frozen = torch.nn.Parameter(torch.full((2,), 5.0), requires_grad=False)
        self.register_buffer("level", torch.zeros(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, indices):
        self.level.fill_(3.0)
        self.calls += 1
        return self.weight[indices]


class Steps:
    """Counts commits, and sums the parameters after them."""

    def __init__(self):
        self.count = 0
        self.sums = [torch.zeros(records)]

    def state_dict(self):
        return {"count": self.count, "sums": self.sums}

    def load_state_dict(self, state):
        self.count, self.sums = state["count"], state["sums"]

    def add(self):
        self.count += 1
        self.sums[0] += net.weight.detach()


job = et.join()
net = Counts()
model = job.model(net)
inner = torch.optim.SGD(
    [{"params": [net.weight]}, {"params": [net.unused], "lr": 0.5}], lr=1.0, momentum=1e-30
)
opt = job.optimizer(inner, reduction="sum")
steps = Steps()
job.state("steps", steps, on_commit=steps.add)
data = DataLoader(
    Numbers(), batch_sampler=job.sampler(records, micro_batch=7), num_workers=loaders
)
for _ in job.epochs():
    for indices in data:
        loss = -model(indices).sum()
        loss.backward()
        time.sleep(micros * len(indices) / 1e6)
        opt.step(loss.detach() / len(indices))
        opt.zero_grad()

assert steps.count == job.step, (steps.count, job.step)
absorbed = expected = 0
for step in range(job.step):
    at = absorbed % records
    absorbed += min(48, records - at)
    expected += absorbed
assert float(steps.sums[0].double().sum()) == expected, (steps.sums, expected)
# They are not in the JSON.
assert len(opt._training._state._saved_text) < records, opt._training._state._saved_text
# With --shard-optimizer, workers have it in chunks.
assert opt._training._chunks or "momentum_buffer" in inner.state[net.weight]
assert net.unused.tolist() == [7.0] * 3 and net.frozen.tolist() == [5.0] * 2
assert abs(float(net.level) - 3.0) < 1e-5, net.level
values = net.weight.detach()
with open(counts, "a") as file:
    file.write(f"{float(values.min())} {float(values.max())}\n")
