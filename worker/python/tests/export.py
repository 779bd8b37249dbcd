"""A program whose module has every kind of tensor, for the tests of exports."""

import sys

import torch

import elasticdl.torch as et


class Net(torch.nn.Module):
    """Tied and frozen parameters, buffers of several types, and a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.frozen = torch.nn.Parameter(torch.full((2, 3), 0.25), requires_grad=False)
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("secret", torch.arange(3), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.embed(x))) * self.scale


def main(path):
    torch.manual_seed(2)
    job, net = et.join(), Net()
    model = job.model(net)
    opt = job.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
    sampler = job.sampler(60, micro_batch=6)
    for _ in job.epochs():
        for indices in sampler:
            x = torch.tensor(indices) % 5
            loss = torch.nn.functional.cross_entropy(model(x), x)
            loss.backward()
            opt.step(loss)
    if job.rank == 0:
        torch.save(net.state_dict(), path)


if __name__ == "__main__":
    main(sys.argv[1])
