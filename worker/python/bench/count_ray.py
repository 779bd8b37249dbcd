"""Counts records under kills, with Ray Train and a checkpoint every few steps."""

import os
import sys
import tempfile

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch.utils.data import DistributedSampler

from progress import log_step
from workload import Counts

records, path, batch, every = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
workers, folder = int(sys.argv[5]), sys.argv[6]


def train():
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    net, start = Counts(records), 0
    found = ray.train.get_checkpoint()
    if found:
        with found.as_directory() as saved:
            saved = torch.load(f"{saved}/checkpoint")
        net.load_state_dict(saved["model"])
        start = saved["step"]
    model = ray.train.torch.prepare_model(net)
    opt = torch.optim.SGD(net.parameters(), lr=float(size))
    sampler = DistributedSampler(range(records), size, rank, shuffle=True, drop_last=False)
    order, share = list(sampler), batch // size
    for step in range(start, -(-len(order) // share)):
        model(torch.tensor(order[step * share : (step + 1) * share])).backward()
        opt.step()
        opt.zero_grad()
        if rank == 0:
            log_step(path, step + 1, size)
        if (step + 1) % every == 0:
            with tempfile.TemporaryDirectory() as saved:
                if rank == 0:
                    state = {"model": net.state_dict(), "step": step + 1}
                    torch.save(state, f"{saved}/checkpoint")
                    ray.train.report({}, checkpoint=Checkpoint.from_directory(saved))
                else:
                    ray.train.report({})
    if rank == 0:
        net.write(path)


ray.init(num_cpus=2 * workers, include_dashboard=False, _temp_dir=f"{folder}/ray")
trainer = ray.train.torch.TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=(1, workers)),
    run_config=RunConfig(
        name="count", storage_path=folder, failure_config=FailureConfig(max_failures=-1)
    ),
)
trainer.fit()
