"""Classifies digits, in the style of Lightning's first example."""

import lightning
import torch
import torch.nn.functional as F
from lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def digits(count, seed):
    shapes = torch.randn(10, 256, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (count,), generator=random)
    return TensorDataset(shapes[target] + 5 * torch.randn(count, 256, generator=random), target)


torch.manual_seed(1)
trainer = Trainer(accelerator="cpu", max_epochs=4, gradient_clip_val=1.0, logger=False)
trainer.fit(
    Classifier(),
    DataLoader(digits(3200, 1), batch_size=64, shuffle=True),
    DataLoader(digits(500, 2), batch_size=500),
)
print("accuracy", float(trainer.callback_metrics["accuracy"]))
