"""PyTorch models on elasticdl.

::

    import elasticdl.torch as et

    job = et.join()
    model = job.model(net)
    opt = job.optimizer(torch.optim.AdamW(net.parameters(), lr=3e-4))
    data = DataLoader(ds, batch_sampler=job.sampler(len(ds), micro_batch=32, global_batch=512))
    for epoch in job.epochs():
        for x, y in data:
            loss = criterion(model(x), y)
            loss.backward()
            opt.step(loss)
            opt.zero_grad()
"""

from ._divided import Divided
from ._job import Job, join
from ._optimizer import Optimizer
from ._random import Dropout
from ._scaler import Scaler
from ._shards import Shards
from ._tables import Embedding, EmbeddingBag, RowAdagrad, RowAdam, RowSGD
from ._weights import load

__all__ = [
    "Divided",
    "Dropout",
    "Embedding",
    "EmbeddingBag",
    "Job",
    "Optimizer",
    "RowAdagrad",
    "RowAdam",
    "RowSGD",
    "Scaler",
    "Shards",
    "join",
    "load",
]
