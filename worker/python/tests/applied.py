"""A program that trains, evaluates and predicts, for the tests of evaluations.

The label of a record is the sign of its values' sum. The module has BatchNorm, whose results in
training mode depend on the micro-batch. Arguments: what the program does in another way than usual;
a folder, for two workers that kill themselves in the midst of a shard.
"""

import contextlib
import os
import pathlib
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.torch as et

RECORDS, FEATURES = 300, 6


def data(count, seed):
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def build():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 2),
    )


def metrics(net, x, y):
    logits = net(x)
    # One metric is a mean, and the other has one value per record.
    loss = torch.nn.functional.cross_entropy(logits, y)
    return {"loss": loss, "accuracy": logits.argmax(1) == y}


def die_twice(folder):
    """Kills this process, unless two others have killed themselves here before."""
    for name in "first", "second":
        with contextlib.suppress(FileExistsError):
            pathlib.Path(folder, name).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)


def main(wrong="", folder=None):
    torch.set_num_threads(1)
    net = build()
    job = et.join()
    model = job.model(net)
    if wrong != "missing":

        @job.evaluator(data(RECORDS, 2), micro_batch=7)
        def evaluate(x, y):
            assert not net[1].training and not torch.is_grad_enabled()
            assert len(x) <= 7, len(x)
            # The last ones of the 16 records that a job asks for.
            if folder and len(x) == 2:
                die_twice(folder)
            found = metrics(net, x, y)
            if wrong == "raises" and y[0]:
                raise ValueError("label refused")
            others = {"list": list(found), "length": {"loss": found["accuracy"][1:]}}
            return others.get(wrong, found)

    @job.predictor(TensorDataset(data(RECORDS, 2).tensors[0]), micro_batch=9)
    def predict(x):
        if folder and len(x) == 7:
            die_twice(folder)
        probability, label = torch.softmax(net(x), 1).max(1)
        return {"class": label, "probability": probability, "text": [f"c{i}" for i in label]}

    if wrong == "run":
        job.run()
    training = data(200, 1)
    opt = job.optimizer(torch.optim.AdamW(net.parameters(), lr=0.02))
    loader = DataLoader(training, batch_sampler=job.sampler(200, micro_batch=10))
    for _ in job.epochs():
        for x, y in loader:
            assert net[1].training and job.work == "train" and job.data == "training.csv"
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step(loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
