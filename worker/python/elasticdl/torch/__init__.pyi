import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch

from .._job import AnyJob

_Module = TypeVar("_Module", bound=torch.nn.Module)

def join() -> Job: ...
def load(net: _Module, path: str | os.PathLike[str]) -> _Module: ...

class Dropout(torch.nn.Dropout): ...

class Job(AnyJob):
    @property
    def device(self) -> torch.device: ...
    def model(self, net: _Module) -> _Module: ...
    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        clip_norm: float | None = None,
        overlap: bool = True,
    ) -> Optimizer: ...
    def scaler(self, scaler: torch.amp.GradScaler) -> Scaler: ...
    def evaluator(
        self,
        dataset: torch.utils.data.Dataset[Any],
        function: Callable[..., Mapping[str, Any]] | None = None,
        *,
        micro_batch: int = 64,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Any: ...
    def predictor(
        self,
        dataset: torch.utils.data.Dataset[Any],
        function: Callable[..., Mapping[str, Any]] | None = None,
        *,
        micro_batch: int = 64,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Any: ...
    def generator(
        self,
        *,
        record: int | None = None,
        step: int | None = None,
        epoch: int | None = None,
        stream: int = 0,
        device: torch.device | str = "cpu",
    ) -> torch.Generator: ...
    def state(
        self,
        name: str,
        value: Any,
        on_commit: Callable[[], Any] | None = None,
        on_epoch: Callable[[], Any] | None = None,
    ) -> None: ...

class Optimizer(torch.optim.Optimizer):
    # Returns a bool. The base class declares what has no other subclass than Any.
    def step(self, loss: Any = None) -> Any: ...

class Scaler:
    def scale(self, outputs: Any) -> Any: ...
    def unscale_(self, optimizer: Any) -> None: ...
    def step(self, optimizer: Optimizer, loss: torch.Tensor | float | None = None) -> bool: ...
    def update(self) -> None: ...
    def get_scale(self) -> float: ...
    def is_enabled(self) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
