"""Trains a language model with an LSTM, in the style of pytorch/examples/word_language_model."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NTOKENS, BPTT = 40, 20


class RNNModel(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(NTOKENS, size)
        self.rnn = nn.LSTM(size, size, batch_first=True)
        self.decoder = nn.Linear(size, NTOKENS)

    def forward(self, words):
        output, _ = self.rnn(self.drop(self.encoder(words)))
        return self.decoder(self.drop(output))


def sentences(count, seed):
    random = torch.Generator().manual_seed(seed)
    words = [torch.randint(NTOKENS, (count,), generator=random)]
    for _ in range(BPTT):
        words.append((words[-1] * 3 + torch.randint(2, (count,), generator=random)) % NTOKENS)
    words = torch.stack(words, 1)
    return TensorDataset(words[:, :-1], words[:, 1:])


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [criterion(model(data).flatten(0, 1), t.flatten()).item() for data, t in loader]
    return sum(losses) / len(losses)


criterion = nn.CrossEntropyLoss()
torch.manual_seed(1111)
train_data, val_data = sentences(2048, 1), sentences(256, 2)
loader = DataLoader(train_data, batch_size=32, shuffle=True)
val_loader = DataLoader(val_data, batch_size=256)
model = RNNModel()
optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
best_val_loss = None
for epoch in range(4):
    model.train()
    for data, targets in loader:
        model.zero_grad()
        loss = criterion(model(data).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    val_loss = evaluate(model, val_loader)
    print(f"end of epoch {epoch}: valid loss {val_loss:5.2f}")
    if best_val_loss is None or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        # Anneal the learning rate if no improvement has been seen.
        for group in optimizer.param_groups:
            group["lr"] /= 4.0
print("valid loss", round(val_loss, 4))
