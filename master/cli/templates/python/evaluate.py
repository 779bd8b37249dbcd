"""Evaluates a model that `elasticdl train --export` has written, and writes its predictions."""

import argparse
import csv

import elasticdl.torch as et
import torch

from model import Line, Points


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="file of --export")
    parser.add_argument("--data", default="data/points.csv", help="CSV file with columns x and y")
    parser.add_argument("--predictions", help="CSV file to write")
    options = parser.parse_args()

    net = et.load(Line(), options.model).eval()
    x, y = Points(options.data).values.split(1, dim=1)
    with torch.no_grad():
        predicted = net(x)
    print(f"loss {torch.nn.functional.mse_loss(predicted, y).item():.6f}")
    if options.predictions:
        with open(options.predictions, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["x", "predicted"])
            rows.writerows(zip(x[:, 0].tolist(), predicted[:, 0].tolist(), strict=True))


if __name__ == "__main__":
    main()
