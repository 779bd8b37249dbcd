from ._elasticdl import Ring as Ring
from ._elasticdl import id_of as id_of
from ._job import Job as Job
from ._job import join as join
from ._launch import launch as launch
from ._sampler import Record as Record
from ._sampler import Sampler as Sampler

def sampler(
    length: int,
    *,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    seed: int | None = None,
    shuffle: bool | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Sampler: ...
