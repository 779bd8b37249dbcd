from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

def register() -> None: ...

class ElasticBackend(Backend):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None: ...
    def getBackendName(self) -> str: ...
