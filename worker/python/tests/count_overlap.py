"""A PyTorch program that sums gradients in many buckets during the backward pass, for the tests of
whole jobs.

Each parameter counts records in its own way, with SGD and a rate of 1, so that a gradient that is
lost, repeated or taken too early shows: ``plain`` counts each record, ``tied`` is used twice,
``reused`` is used in two places of the graph, ``even`` has no gradient in micro-batches without
even records, and ``unused`` never has one. Workers have several micro-batches in each step.

On a fake GPU, work may be on other streams than the trainer's, by the last argument: ``alive``, as
a graph from before the loop is; ``stream``, on the program's own; ``thread``, of another thread.
"""

import itertools
import sys
import threading
import time

import torch

import elasticdl.torch as et
from elasticdl.torch import _gradients, _training

records, micros, counts, overlap = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
work = sys.argv[5] if len(sys.argv) > 5 else ""
_training._BUCKET_LEN = max(records // 4, 1)
announced = 0


class Observed(_gradients.Gradients):
    def _announce(self):
        global announced
        before = self._buckets
        super()._announce()
        announced += self._buckets - before


_training.Gradients = Observed


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        zeros = lambda: torch.nn.Parameter(torch.zeros(records))
        self.plain, self.tied, self.even, self.reused = zeros(), zeros(), zeros(), zeros()
        self.again = self.tied
        self.unused = torch.nn.Parameter(torch.full((3,), 7.0))
        self.last = zeros()

    def forward(self, indices):
        total = self.plain[indices].sum() + self.tied[indices].sum() + self.again[indices].sum()
        even = indices[indices % 2 == 0]
        if len(even):
            total = total + self.even[even].sum()
        # Other operations lie between the two uses.
        total = total + (self.reused[indices] + (self.reused * 1.0)[indices]).sum()
        return total + self.last[indices].sum()


job = et.join()
net = Counts()
job.model(net)
opt = job.optimizer(
    torch.optim.SGD(net.parameters(), lr=1.0), reduction="sum", overlap=overlap == "True"
)


def train(batches):
    for indices in batches:
        opt.zero_grad()
        loss = -net(torch.tensor(indices))
        loss.backward()
        time.sleep(micros * len(indices) / 1e6)
        opt.step(loss.detach() / len(indices))


def train_checked(batches):
    with fake_streams.Checked():
        train(batches)


sampler = job.sampler(records, micro_batch=5)
batches = (indices for _ in job.epochs() for indices in sampler)
if work:
    # Those of the fake GPU.
    import fake_streams
if not work:
    train(batches)
elif work == "alive":
    kept = fake_streams.keep_alive(net, torch.arange(records))
    train_checked(batches)
elif work == "stream":
    with torch.cuda.stream(torch.cuda.Stream()):
        train_checked(batches)
else:
    drawn = itertools.chain([next(batches)], batches)
    thread = threading.Thread(target=train_checked, args=[drawn])
    thread.start()
    thread.join()

assert net.unused.tolist() == [7.0] * 3
even = torch.arange(records) % 2 == 0
assert not net.even[~even].any()
for name, value, times in (
    ("tied", net.tied, 2),
    ("reused", net.reused, 2),
    ("last", net.last, 1),
    ("even", torch.where(even, net.even, net.plain), 1),
):
    assert torch.equal(value, times * net.plain), name
assert announced > 0 if overlap == "True" else announced == 0, announced
with open(counts, "a") as file:
    file.write(f"{float(net.plain.min())} {float(net.plain.max())}\n")
