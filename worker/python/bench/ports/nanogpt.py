"""Trains a character-level transformer, in the style of nanoGPT's train.py."""

import math

import torch
from torch import nn
from torch.nn import functional as F

batch_size, block_size, n_embd, n_head, n_layer = 32, 32, 32, 4, 2
max_iters, warmup_iters, eval_interval = 120, 10, 40
learning_rate, min_lr, grad_clip = 3e-3, 3e-4, 1.0
vocab_size = 27


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        parts = self.qkv(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (part.unflatten(2, (n_head, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.blocks(self.wte(idx) + self.wpe.weight[: idx.shape[1]])
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text(count, seed):
    """Characters, each of which has three that may follow."""
    random = torch.Generator().manual_seed(seed)
    choices = torch.randint(3, (count,), generator=random).tolist()
    found = [0]
    for choice in choices:
        found.append((found[-1] * 5 + 7 * choice + 1) % vocab_size)
    return torch.tensor(found)


def get_batch(data, ix):
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model, data):
    model.eval()
    loss = model(*get_batch(data, range(0, len(data) - block_size - 1, block_size))).item()
    model.train()
    return loss


torch.manual_seed(1337)
train_data, val_data = text(batch_size * max_iters + block_size, 1), text(2000, 2)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
order = torch.randperm(len(train_data) - block_size - 1).tolist()
for iter_num in range(max_iters):
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss(model, val_data):.4f}")
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    X, Y = get_batch(train_data, order[iter_num * batch_size : (iter_num + 1) * batch_size])
    loss = model(X, Y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print("val loss", round(estimate_loss(model, val_data), 4))
