from collections.abc import Iterator
from typing import Any, SupportsFloat

import accelerate
import torch

from ..torch import Job

class Accelerator(accelerate.Accelerator):
    job: Job
    def __init__(
        self,
        *,
        job: Job | None = None,
        epochs: int = 1,
        seed: int = 0,
        clip_norm: float | None = None,
        **options: Any,
    ) -> None: ...
    def epochs(self) -> Iterator[int]: ...
    def backward(
        self, loss: torch.Tensor, *, weight: SupportsFloat | None = None, **options: Any
    ) -> None: ...
