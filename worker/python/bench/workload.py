"""Models, data and timing, which the programs of the comparison share."""

import os
import sys
import time

import torch

from progress import MILLISECONDS_PER_RECORD, RECORDS_PER_STEP


class Timer:
    """Measures the rate of the steps after the first ones."""

    def __init__(self):
        self.count = 0
        self.started = None

    def step(self):
        self.count += 1
        if self.count == WARM_UP:
            self.started = time.perf_counter()

    def write_rate(self):
        """Adds the rate to the file that RATE_FILE names."""
        rate = (self.count - WARM_UP) / (time.perf_counter() - self.started)
        with open(os.environ["RATE_FILE"], "a") as file:
            file.write(f"{rate:.3f}\n")


def build():
    """The module, the data set and the number of steps that the arguments name."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, steps = sys.argv[1], int(sys.argv[2])
    if name in ("mlp", "large"):
        # 10.0 and 50.2 million parameters.
        width = 2880 if name == "mlp" else 18000
        layers = [torch.nn.Linear(1024, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, width)]
        net = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(width, 703))
        shape, classes = (1024,), 703
    else:
        # 0.1 million parameters.
        net = torch.nn.Sequential(
            *(torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            *(torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            *(torch.nn.Flatten(), torch.nn.Linear(32 * 49, 64), torch.nn.ReLU()),
            torch.nn.Linear(64, 10),
        )
        shape, classes = (1, 28, 28), 10
    x = torch.randn(256, *shape)
    return net, Repeated(x, torch.randint(classes, (256,)), steps * RECORDS_PER_STEP)


class Repeated(torch.utils.data.Dataset):
    """A data set of any length from a few tensors."""

    def __init__(self, x, y, length):
        self.x, self.y, self.length = x, y, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.x[index % len(self.x)], self.y[index % len(self.y)]


class Counts(torch.nn.Module):
    """A model that counts its records: record ``i`` adds 1 to parameter ``i``."""

    def __init__(self, records):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(records))

    def forward(self, indices):
        # What computing a record takes.
        time.sleep(len(indices) * MILLISECONDS_PER_RECORD / 1000)
        return -self.counts[indices].sum()

    def write(self, path):
        """Writes how often each record was counted, as numbers of 32 bits."""
        write_counts(path, self.counts.detach())


class CountsInTables(Counts):
    """``Counts`` with embedding tables: record ``i`` also adds 1 to number ``i // ROWS`` of row
    ``i % ROWS`` of each table.

    ``tables`` is a module that returns the rows ``[records, TABLES, DIM]`` of ids ``[records]``.
    """

    def __init__(self, records, tables):
        super().__init__(records)
        if records > ROWS * DIM:
            raise ValueError(f"{records} records; the tables have room for {ROWS * DIM}")
        self.tables = tables

    def forward(self, indices):
        rows = self.tables(indices % ROWS)
        numbers = rows[torch.arange(len(indices)), :, indices // ROWS]
        return super().forward(indices) - numbers.sum()


def write_worst_counts(path, counts, tables):
    """Writes, of the numbers that count a record, the one farthest from 1: a record that only one
    of the tables ``[ROWS, DIM]`` lacks is lost."""
    of_tables = [table.t().flatten()[: len(counts)] for table in tables]
    counts = torch.stack([counts, *of_tables]).round()
    least, most = counts.min(0).values, counts.max(0).values
    write_counts(path, torch.where(least < 1, least, most))


def write_counts(path, counts):
    """Replaces the file as a whole."""
    new = f"{path}.{os.getpid()}"
    counts.numpy().tofile(new)
    os.replace(new, path)


WARM_UP = 5
# The tables hold 6.4 MB.
TABLES, ROWS, DIM = 4, 25_000, 16
