from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import SingleDeviceStrategy

from ..torch import Job

class Trainer(pl.Trainer):
    job: Job
    def __init__(self, *, job: Job | None = None, seed: int = 0, **options: Any) -> None: ...

class ElasticStrategy(SingleDeviceStrategy):
    job: Job
    def __init__(self, job: Job, *, clip_norm: float | None, batches: int, seed: int) -> None: ...
