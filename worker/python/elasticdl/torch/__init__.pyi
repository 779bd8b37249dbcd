import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat, TypeVar

import torch

from .._job import AnyJob

_Batch = TypeVar("_Batch")
_Record = TypeVar("_Record")
# Tensors, and lists, tuples and dicts of them.
_Values = TypeVar("_Values")
_Module = TypeVar("_Module", bound=torch.nn.Module)

# Ids by record, or a pair of ids and offsets; or several of these.
_Feature = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_Ids = _Feature | list[_Feature]
_RowOptimizer = RowAdagrad | RowAdam | RowSGD

def join() -> Job: ...
def load(net: _Module, path: str | os.PathLike[str]) -> _Module: ...

class Dropout(torch.nn.Dropout): ...

class Embedding(torch.nn.Module):
    name: str
    dim: int
    def forward(self, ids: torch.Tensor) -> torch.Tensor: ...
    def __call__(self, ids: torch.Tensor) -> torch.Tensor: ...

class EmbeddingBag(torch.nn.Module):
    name: str
    dim: int
    mode: Literal["mean", "sum"]
    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor: ...
    def __call__(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor: ...

@dataclass(frozen=True)
class RowAdagrad:
    lr: float = 0.01
    eps: float = 1e-8

@dataclass(frozen=True)
class RowAdam:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

@dataclass(frozen=True)
class RowSGD:
    lr: float = 0.01

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
        unfreezes: bool = False,
    ) -> Optimizer: ...
    def scaler(self, scaler: torch.amp.GradScaler) -> Scaler: ...
    def embedding(
        self,
        name: str,
        dim: int,
        *,
        optimizer: _RowOptimizer | None = None,
        bound: float = 0.05,
        admitted_after: int = 1,
        evicted_after: int | None = None,
        evicted_below: float | None = None,
    ) -> Embedding: ...
    def embedding_bag(
        self,
        name: str,
        dim: int,
        *,
        mode: Literal["mean", "sum"] = "mean",
        optimizer: _RowOptimizer | None = None,
        bound: float = 0.05,
        admitted_after: int = 1,
        evicted_after: int | None = None,
        evicted_below: float | None = None,
    ) -> EmbeddingBag: ...
    def batches(
        self, loader: Iterable[_Batch], ids: Callable[[_Batch], Mapping[str, _Ids]]
    ) -> Iterable[_Batch]: ...
    def evaluator(
        self,
        dataset: torch.utils.data.Dataset[Any],
        function: Callable[..., Mapping[str, Any]] | None = None,
        *,
        micro_batch: int = 64,
        collate: Callable[[list[Any]], Any] | None = None,
        ids: Callable[[Any], Mapping[str, _Ids]] | None = None,
    ) -> Any: ...
    def predictor(
        self,
        dataset: torch.utils.data.Dataset[Any],
        function: Callable[..., Mapping[str, Any]] | None = None,
        *,
        micro_batch: int = 64,
        collate: Callable[[list[Any]], Any] | None = None,
        ids: Callable[[Any], Mapping[str, _Ids]] | None = None,
    ) -> Any: ...
    def divided(self, loader: torch.utils.data.DataLoader[_Batch]) -> Divided[_Batch]: ...
    def gather_for_metrics(self, values: _Values) -> _Values: ...
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

class Divided(Iterable[_Batch]):
    dataset: torch.utils.data.Dataset[Any]
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[_Batch]: ...

class Optimizer(torch.optim.Optimizer):
    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]
    state: Any
    # Returns a bool. The base class declares what has no other subclass than Any.
    def step(self, loss: Any = None, *, weight: SupportsFloat | None = None) -> Any: ...

class Shards(torch.utils.data.Dataset[_Record]):
    def __init__(
        self,
        records: Sequence[int],
        read: Callable[[int], Iterable[_Record]],
        *,
        kept: int = 4,
    ) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> _Record: ...

class Scaler:
    def scale(self, outputs: Any) -> Any: ...
    def unscale_(self, optimizer: Any) -> None: ...
    def step(
        self,
        optimizer: Optimizer,
        loss: torch.Tensor | float | None = None,
        *,
        weight: SupportsFloat | None = None,
    ) -> bool: ...
    def update(self) -> None: ...
    def get_scale(self) -> float: ...
    def is_enabled(self) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
