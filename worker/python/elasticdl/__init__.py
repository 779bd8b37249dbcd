"""Elastic synchronous data-parallel training.

``elasticdl train --local -- python train.py`` starts several processes of a program; in each of
them :func:`join` returns a :class:`Job`. The processes train one model. Any of them may be killed
or added at any time, and every record counts exactly once. ``python train.py`` alone trains in a
group of one.

This module needs nothing but Python. For PyTorch, use :mod:`elasticdl.torch`.
"""

from ._data import sampler
from ._elasticdl import Ring, id_of
from ._job import Job, join
from ._launch import launch
from ._sampler import Record, Sampler

__all__ = ["Job", "Record", "Ring", "Sampler", "id_of", "join", "launch", "sampler"]
