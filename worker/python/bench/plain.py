"""The plain loop."""

import torch
from torch.utils.data import DataLoader

from workload import RECORDS_PER_STEP, Timer, build

net, data = build()
timer = Timer()
model = net
opt = torch.optim.SGD(net.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=RECORDS_PER_STEP, shuffle=True)
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    timer.step()
timer.write_rate()
