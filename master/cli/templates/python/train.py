"""Trains the model: alone with `python train.py`, or as each worker of a job; see README.md."""

import argparse

import elasticdl.torch as et
import torch
from torch.utils.data import DataLoader

from model import Line, Points


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/points.csv", help="CSV file with columns x and y")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    options = parser.parse_args()

    torch.manual_seed(0)
    net = Line()
    job = et.join()
    model = job.model(net)
    # With `elasticdl evaluate` and `elasticdl predict`, the data is that of their --data.
    points = Points(job.data or options.data)

    @job.evaluator(Points(job.validation_data) if job.validation_data else points)
    def evaluate(x, y):
        return {"loss": torch.nn.functional.mse_loss(model(x), y)}

    @job.predictor(points)
    def predict(x, y):
        return {"x": x[:, 0], "predicted": model(x)[:, 0]}

    opt = job.optimizer(torch.optim.SGD(net.parameters(), lr=options.learning_rate, momentum=0.9))
    # Each batch is a part of a step; a job's --global-batch-size says how large a step is.
    data = DataLoader(points, batch_sampler=job.sampler(len(points), micro_batch=10))
    for epoch in job.epochs():
        for x, y in data:
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step(loss)
            opt.zero_grad()
    weight, bias = net.line.weight.item(), net.line.bias.item()
    print(f"y = {weight:.2f} x {'-' if bias < 0 else '+'} {abs(bias):.2f}")


if __name__ == "__main__":
    main()
