"""A language model whose loss is a mean over tokens, for the tests of weights.

Arguments: maximum number of records of a micro-batch, and a file, to which the process adds a line:
the parameters, in JSON. Records have 0 to 30 tokens, and the others are padding. ``plain()``
returns the parameters of the plain loop.
"""

import functools
import json
import sys
import time

import torch

RECORDS, BATCH, EPOCHS, LENGTH, WORDS, PADDING = 512, 64, 3, 30, 11, -100


def build():
    random = torch.Generator().manual_seed(3)
    words = torch.randint(WORDS, (RECORDS, LENGTH), generator=random)
    lengths = (LENGTH * torch.rand(RECORDS, 1, generator=random) ** 3).round()
    wanted = torch.where(torch.arange(LENGTH) < lengths, (words * 3 + 1) % WORDS, PADDING)
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Embedding(WORDS, 6), torch.nn.Linear(6, WORDS))
    return words, wanted, net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)


def loss_of(net, words, wanted, reduction):
    return torch.nn.functional.cross_entropy(
        net(words).flatten(0, 1), wanted.flatten(), ignore_index=PADDING, reduction=reduction
    )


def values_of(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@functools.cache
def plain():
    words, wanted, net, opt = build()
    for _ in range(EPOCHS):
        for at in range(0, RECORDS, BATCH):
            part = slice(at, at + BATCH)
            loss_of(net, words[part], wanted[part], "mean").backward()
            opt.step()
            opt.zero_grad()
    return values_of(net)


def train(micro, reduction, overlap, alone=False, pause=0.0):
    import elasticdl.torch as et

    torch.set_num_threads(1)
    words, wanted, net, opt = build()
    job = et.join()
    job.model(net)
    opt = job.optimizer(opt, reduction=reduction, overlap=overlap)
    order = {"global_batch": BATCH, "epochs": EPOCHS, "shuffle": False} if alone else {}
    sampler = job.sampler(RECORDS, micro_batch=micro, **order)
    for _ in job.epochs():
        for indices in sampler:
            loss = loss_of(net, words[indices], wanted[indices], reduction)
            loss.backward()
            time.sleep(pause)
            opt.step(weight=(wanted[indices] != PADDING).sum())
            opt.zero_grad()
    return values_of(net)


if __name__ == "__main__":
    found = train(int(sys.argv[1]), "mean", overlap=True, pause=0.05)
    with open(sys.argv[2], "a") as file:
        file.write(json.dumps(found.tolist()) + "\n")
