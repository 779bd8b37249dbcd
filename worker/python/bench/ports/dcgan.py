"""Trains a generator of images against a discriminator, in the style of pytorch/examples/dcgan."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

nz, ngf, ndf, niter = 8, 16, 16, 3

netG = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf, 4, bias=False),
    nn.BatchNorm2d(ngf),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, 1, 4, bias=False),
    nn.Flatten(0),
)


def images(count):
    """Bright columns at the left or the right of dark images."""
    random = torch.Generator().manual_seed(1)
    found = 0.1 * torch.randn(count, 1, 8, 8, generator=random) - 0.8
    is_left = torch.rand(count, generator=random) < 0.5
    found[is_left, :, :, :3] += 1.5
    found[~is_left, :, :, 5:] += 1.5
    return TensorDataset(found.clamp(-1, 1))


torch.manual_seed(999)
dataloader = DataLoader(images(3200), batch_size=64, shuffle=True)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
for epoch in range(niter):
    for (real,) in dataloader:
        # Update D: maximize log(D(x)) + log(1 - D(G(z))).
        netD.zero_grad()
        output = netD(real)
        errD_real = criterion(output, torch.ones_like(output))
        errD_real.backward()
        fake = netG(torch.randn(len(real), nz, 1, 1))
        output = netD(fake.detach())
        errD_fake = criterion(output, torch.zeros_like(output))
        errD_fake.backward()
        optimizerD.step()
        # Update G: maximize log(D(G(z))).
        netG.zero_grad()
        output = netD(fake)
        errG = criterion(output, torch.ones_like(output))
        errG.backward()
        optimizerG.step()
    print(f"epoch {epoch} loss D {errD_real + errD_fake:.3f} G {errG:.3f}")
with torch.no_grad():
    bright = (netG(torch.randn(500, nz, 1, 1)) > 0).float().mean().item()
print("bright (about 0.3750)", round(bright, 4))
