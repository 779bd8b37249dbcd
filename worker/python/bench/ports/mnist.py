"""Classifies digits, in the style of pytorch/examples/mnist."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(8 * 7 * 7, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def digits(count, seed):
    shapes = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (count,), generator=random)
    noise = 3 * torch.randn(count, 1, 16, 16, generator=random)
    return TensorDataset(shapes[target] + noise, target)


def train(model, loader, optimizer, epoch):
    model.train()
    for at, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if at % 20 == 0:
            print(f"epoch {epoch} batch {at} loss {loss.item():.3f}")


def test(model, loader):
    model.eval()
    with torch.no_grad():
        correct = sum((model(data).argmax(1) == target).sum().item() for data, target in loader)
    return correct / len(loader.dataset)


def main():
    torch.manual_seed(1)
    train_set, test_set = digits(3200, 1), digits(500, 2)
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=500)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(3):
        train(model, loader, optimizer, epoch)
        accuracy = test(model, test_loader)
        scheduler.step()
    print("accuracy", accuracy)
    torch.save(model.state_dict(), "mnist.pt")


if __name__ == "__main__":
    main()
