"""A PyTorch program for jobs with --deterministic, with and without --shard-optimizer, whose
parameters are several chunks: ``sharded.py SECONDS FILE [OPTIMIZER]``. Each worker that completes
writes what it has to the file."""

import hashlib
import sys
import time

import torch

import elasticdl.torch as et

torch.set_num_threads(1)
torch.manual_seed(3)
x, y = torch.randn(300, 12), torch.randint(3, (300,))
words = torch.randint(40, (300,))
net = torch.nn.Sequential(
    torch.nn.Linear(12, 200), torch.nn.ReLU(), torch.nn.Linear(200, 70), et.Dropout(0.2),
    torch.nn.Linear(70, 3),
)
net.add_module("words", torch.nn.Embedding(40, 3, sparse=True))
net.register_buffer("scale", torch.full((5,), 0.5))
net[0].bias.requires_grad = False


class Average:
    """Of the parameters, over the steps."""

    values = torch.zeros(sum(p.numel() for p in net.parameters()))

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"].clone()

    def add(self):
        flat = torch.cat([p.detach().flatten() for p in net.parameters()])
        self.values = 0.9 * self.values + 0.1 * flat


job = et.join()
job.model(net)
average = Average()
job.state("average", average, on_commit=average.add)
biases = [net[2].bias, net[4].bias]
inner = getattr(torch.optim, sys.argv[3] if len(sys.argv) > 3 else "NAdam")(
    [
        {"params": [net[0].weight, net[0].bias, net[2].weight], "weight_decay": 0.1},
        {"params": [net[4].weight, *biases, net.words.weight], "lr": 0.02},
    ],
    lr=0.01,
)
opt = job.optimizer(inner, clip_norm=0.05)
schedule = torch.optim.lr_scheduler.StepLR(inner, 7, 0.8)
sampler = job.sampler(len(x), micro_batch=3)
for _ in job.epochs():
    for indices in sampler:
        opt.param_groups[1]["eps"] = 1e-8 * (1 + job.step)
        found = net[:5](x[indices]) * net.scale[0] + net.words(words[indices])
        loss = torch.nn.functional.cross_entropy(found, y[indices])
        loss.backward()
        time.sleep(float(sys.argv[1]))
        opt.step(loss)
        schedule.step()
values = [*net.state_dict().values(), average.values]
bits = b"".join(value.detach().numpy().tobytes() for value in values)
settings = [(group["lr"], group["eps"]) for group in opt.param_groups]
with open(sys.argv[2], "a") as file:
    file.write(f"{hashlib.sha256(bits).hexdigest()} {settings}\n")
