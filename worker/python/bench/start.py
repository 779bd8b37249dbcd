"""The first steps of a model with AdamW: plain, with elasticdl, or there with a moving average too.

Writes seconds per step after the first ones, the peak of the process's memory in MiB, and when its
first step ended, in seconds since the start that START names.
"""

import os
import resource
import sys
import time

import torch
from torch.utils.data import DataLoader

import elasticdl.torch as et
from workload import RECORDS_PER_STEP, WARM_UP, build

net, data = build()
mode = sys.argv[3]
inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
job = et.join() if mode != "plain" else None
model, opt, options = net, inner, {"batch_size": RECORDS_PER_STEP, "shuffle": True}
if job:
    model, opt = job.model(net), job.optimizer(inner)
    options = {"batch_sampler": job.sampler(len(data), micro_batch=RECORDS_PER_STEP)}
if mode == "average":
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    )
    job.state("average", average, on_commit=lambda: average.update_parameters(net))
ended = []
for x, y in DataLoader(data, **options):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step(loss) if job else opt.step()
    opt.zero_grad()
    ended.append(time.time())
per_step = (ended[-1] - ended[WARM_UP - 1]) / (len(ended) - WARM_UP)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
with open(os.environ["RATE_FILE"], "a") as file:
    file.write(f"{per_step:.4f} {peak:.0f} {ended[0] - float(os.environ['START']):.2f}\n")
