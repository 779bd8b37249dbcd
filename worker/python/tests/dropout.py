"""A program that writes down the random numbers of each record, for the tests of whole jobs."""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader

import elasticdl.torch as et

records, micros, path, loaders = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
alone = len(sys.argv) > 5


class Noise(torch.utils.data.Dataset):
    """Augments each record by random numbers of its own, in any process."""

    def __len__(self):
        return records

    def __getitem__(self, record):
        generator = torch.Generator().manual_seed(record.seed_for(stream=7))
        return int(record), record.epoch, torch.rand(8, generator=generator)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            et.Dropout(0.25), torch.nn.Linear(8, 8), et.Dropout(0.5, inplace=True)
        )
        self.mask = None

    def forward(self, noise):
        self.mask = self.layers[2](self.layers[0](torch.ones(len(noise), 8)))
        return self.layers(noise)


torch.manual_seed(3)
job = et.join()
net = Net()
model = job.model(net)
opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01))
options = {"global_batch": 48, "epochs": 2, "seed": 5} if alone else {}
sampler = job.sampler(records, micro_batch=7, **options)
file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in job.epochs():
    for indices, epochs, noise in DataLoader(Noise(), batch_sampler=sampler, num_workers=loaders):
        loss = model(noise).square().mean()
        loss.backward()
        time.sleep(micros * len(indices) / 1e6)
        lines = []
        for row, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist())):
            generator = job.generator(record=index, epoch=epoch)
            drawn = [*net.mask[row].tolist(), *noise[row].tolist()]
            drawn.append(torch.rand((), generator=generator))
            lines.append(" ".join(str(float(number)) for number in [epoch, index, *drawn]) + "\n")
        os.write(file, "".join(lines).encode())
        opt.step(loss)
values = [value for parameter in net.parameters() for value in parameter.flatten().tolist()]
with open(path + ".values", "w") as last:
    last.write(" ".join(map(str, values)))
