from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, SupportsFloat

from ._sampler import Record, Sampler

def join() -> Job: ...

class AnyJob:
    @property
    def generation(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def is_main(self) -> bool: ...
    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None: ...
    @property
    def world_size(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def work(self) -> Literal["evaluate", "predict", "train"]: ...
    @property
    def data(self) -> str | None: ...
    @property
    def validation_data(self) -> str | None: ...
    @property
    def micro_batch(self) -> list[Record]: ...
    @property
    def seed(self) -> int: ...
    def seed_for(
        self,
        *,
        record: int | None = None,
        step: int | None = None,
        epoch: int | None = None,
        stream: int = 0,
    ) -> int: ...
    def sampler(
        self,
        length: int,
        *,
        micro_batch: int = 32,
        global_batch: int | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        seed: int | None = None,
        shuffle: bool | None = None,
    ) -> Sampler: ...
    def epochs(self) -> Iterator[int]: ...
    @property
    def steps(self) -> int | None: ...
    def run(self) -> None: ...
    def report(self, name: str, mean: SupportsFloat) -> None: ...

class Job(AnyJob):
    @property
    def parameters(self) -> memoryview[float]: ...
    @property
    def gradient(self) -> memoryview[float]: ...
    @property
    def state(self) -> Any: ...
    def model(
        self,
        parameters: int,
        *,
        state: int = 0,
        initialize: Callable[[int], Any] | None = None,
        update: Callable[[int, int], Any] | None = None,
        name: str = "parameters",
    ) -> None: ...
    def evaluator(
        self,
        length: int,
        function: Callable[[list[int]], Mapping[str, Any]] | None = None,
        *,
        micro_batch: int = 64,
    ) -> Any: ...
    def predictor(
        self,
        length: int,
        function: Callable[[list[int]], Mapping[str, Any]] | None = None,
        *,
        micro_batch: int = 64,
    ) -> Any: ...
    def commit(
        self, loss: float = 0.0, *, reduction: Literal["mean", "sum"] = "mean"
    ) -> bool: ...
