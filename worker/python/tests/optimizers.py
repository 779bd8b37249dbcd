"""Two networks with an optimizer each, stepped in turn on each batch, for the tests of whole jobs.

Arguments: microseconds per record, and a file for the parameters; with 0 microseconds it is a plain
loop, in the order of the data, whose optimizers step after both backward passes.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

RECORDS, BATCH, EPOCHS = 960, 48, 2

micros, path = int(sys.argv[1]), sys.argv[2]
x = torch.randn(RECORDS, 5, generator=torch.Generator().manual_seed(3))
torch.manual_seed(1)
tells, makes = torch.nn.Linear(5, 1), torch.nn.Linear(5, 5)
of_tells = torch.optim.SGD(tells.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
of_makes = torch.optim.Adam(makes.parameters(), lr=0.01, eps=1e-3)
schedules = [torch.optim.lr_scheduler.StepLR(of_tells, 1, 0.5)]
options = {"batch_size": BATCH}
if micros:
    import elasticdl.torch as et

    job = et.join()
    job.model(torch.nn.ModuleList([tells, makes]))
    of_tells = job.optimizer(of_tells)
    of_makes = job.optimizer(of_makes, clip_norm=0.02)
    options = {"batch_sampler": job.sampler(RECORDS, micro_batch=BATCH)}
loader = DataLoader(TensorDataset(x), **options)
for _ in job.epochs() if micros else range(EPOCHS):
    for (batch,) in loader:
        of_tells.zero_grad()
        made = makes(batch)
        loss = (torch.sigmoid(tells(made.detach())) - torch.sigmoid(tells(batch))).mean()
        loss.backward()
        if micros:
            of_tells.step(loss)
        else:
            kept = [parameter.grad.clone() for parameter in tells.parameters()]
        of_makes.zero_grad()
        (-torch.sigmoid(tells(made))).mean().backward()
        if not micros:
            for parameter, gradient in zip(tells.parameters(), kept, strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(makes.parameters(), 0.02)
            of_tells.step()
        of_makes.step(*[loss] if micros else [])
        time.sleep(micros * len(batch) / 1e6)
    for schedule in schedules:
        schedule.step()
values = [
    value for net in (tells, makes) for p in net.parameters() for value in p.flatten().tolist()
]
with open(path, "a") as file:
    file.write(" ".join(map(str, values)) + "\n")
