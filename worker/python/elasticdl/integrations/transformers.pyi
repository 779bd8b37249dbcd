from typing import Any

import transformers

from ..torch import Job

class ElasticTrainer:
    job: Job
    def __init__(self, *arguments: Any, job: Job | None = None, **options: Any) -> None: ...

class Trainer(ElasticTrainer, transformers.Trainer): ...
