"""Classifies digits, in the style of accelerate's examples."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


def digits(count, seed):
    shapes = torch.randn(10, 256, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (count,), generator=random)
    return TensorDataset(shapes[target] + 5 * torch.randn(count, 256, generator=random), target)


torch.manual_seed(1)
accelerator = Accelerator(cpu=True)
train_loader = DataLoader(digits(3200, 1), batch_size=64, shuffle=True)
test_loader = DataLoader(digits(500, 2), batch_size=100)
model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = OneCycleLR(optimizer, max_lr=2e-3, epochs=4, steps_per_epoch=len(train_loader))
model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, test_loader, scheduler
)
for epoch in range(4):
    model.train()
    for x, y in train_loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    correct = 0
    for x, y in test_loader:
        with torch.no_grad():
            found = model(x).argmax(1)
        found, y = accelerator.gather_for_metrics((found, y))
        correct += (found == y).sum().item()
accelerator.print("accuracy", correct / 500)
