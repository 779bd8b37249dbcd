"""The backend ``elasticdl`` of ``torch.distributed``: collectives on the CPU and on CUDA devices.

::

    torch.distributed.init_process_group("elasticdl")

finds this module where the package is installed; elsewhere, import it first. The links between the
ranks are authenticated by a secret that rank 0 puts into the store of the process group; whoever
can read the store can join. A group whose rank is lost ends: its operations raise an error on all
ranks.

Operations run one after the other, in a thread of the native code, which holds Python's lock only
to report a result: all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, reduce, gather,
scatter and barrier. Sums of f32, f16 and bf16 pass through the ring and are f32 on the way; other
types and operations are gathered on every rank and reduced there. reduce_scatter, all_to_all,
gather and scatter send each rank what is for it, at most 1 GiB from one rank to another. send and
recv go through the store; PyTorch gives a backend in Python no way to tell who sent what
``recv(src=None)`` got. Tensors on GPUs go over NCCL, or are copied to page-locked memory of the host
and back, in stream order; ``work.wait()`` blocks until the results are on the GPU.

:class:`ElasticProcessGroup` is a process group that is formed again and again, by PyTorch's
interface for reconfiguration.
"""

import atexit
import hashlib
import os
import secrets
import socket

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend

from .. import _elasticdl
from ._collectives import Collectives, done_work
from ._devices import Devices
from ._meeting import address_towards
from ._point_to_point import PointToPoint


def register():
    """Makes the backend known to ``torch.distributed``."""
    if "elasticdl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("elasticdl", ElasticBackend, devices=["cpu", "cuda"])


class ElasticBackend(Collectives, _Backend):
    """One rank of a process group of a fixed size."""

    def __init__(self, store, rank, size, timeout):
        _Backend.__init__(self, rank, size)
        self._limit = timeout.total_seconds()
        self._ring = _elasticdl.Ring(_address_towards(store))
        store.set(f"elasticdl/address/{rank}", self._ring.address)
        if rank == 0:
            store.set("elasticdl/secret", secrets.token_hex(32))
        names = [f"elasticdl/address/{rank}" for rank in range(size)]
        store.wait([*names, "elasticdl/secret"], timeout)
        self._ring.connect(
            name="torch.distributed",
            secret=store.get("elasticdl/secret"),
            rank=rank,
            addresses=[store.get(name).decode() for name in names],
            timeout=self._limit,
        )
        self._devices = Devices()
        self._point_to_point = PointToPoint(store, rank)
        # Where the program does not destroy the group.
        atexit.register(self._ring.close)

    def getBackendName(self):
        """Name of the backend."""
        return "elasticdl"

    def abort(self):
        """Ends the group: its operations fail on all ranks."""
        self._point_to_point.end()
        self._ring.abort()

    def shutdown(self):
        """Ends this rank's part of the group, after the operations that have begun."""
        self._point_to_point.end()
        self._ring.shut_down()
        atexit.unregister(self._ring.close)


class ElasticProcessGroup(Collectives, dist.ProcessGroup):
    """A process group whose members change: survivors of a loss, and newcomers, form it anew.

    ::

        group = ElasticProcessGroup("10.0.0.7")
        options = ReconfigureOptions()                     # from torch._C._distributed_c10d
        options.uuid = 1                                   # another one each time
        options.handles = exchange(group.get_reconfigure_handle())
        group.reconfigure(options).wait()

    Handles are exchanged by the program, by means of its own; whoever has those of all members can
    join. A list of them determines the ranks; a set leaves them to the group. Before the first
    ``reconfigure()``, rank and size are -1. An operation that fails ends the group, on all ranks;
    tensors are then as before. The group can be passed to DDP; there are no send and recv.
    """

    def __init__(self, address=None, timeout=dist.default_pg_timeout):
        """``address``: this host's, on the network between the members. Default: that on the route
        to ``MASTER_ADDR``. ``timeout``: of operations, as a ``datetime.timedelta``."""
        dist.ProcessGroup.__init__(self, -1, -1)
        self._address = address or _address_towards(None)
        self._limit = timeout.total_seconds()
        self._members = -1, -1
        self._ring = _NoRing()
        self._next = None
        self._uuids = set()
        self._devices = Devices()
        self._point_to_point = _NoPointToPoint()
        atexit.register(self._end)

    def getBackendName(self):
        """Name of the backend."""
        return "elasticdl"

    def getRank(self):
        """Rank of this process; -1 before the first ``reconfigure()``."""
        return self._members[0]

    def getSize(self):
        """Number of members; -1 before the first ``reconfigure()``."""
        return self._members[1]

    @property
    def supports_reconfigure(self):
        """True."""
        return True

    def get_reconfigure_handle(self):
        """What the members of the next group have to know of this one: its address, and a secret.

        It is the same until ``reconfigure()`` uses it.
        """
        if self._next is None:
            ring = _elasticdl.Ring(self._address)
            self._next = ring, f"{ring.address}/{secrets.token_hex(16)}"
        return self._next[1]

    def reconfigure(self, opts):
        """Ends the group, and forms another one with those whose handles are given.

        ``opts.uuid``: a number that this group has not had. Returns a work object that is done.

        Raises ValueError if the handles lack this member's or are invalid, RuntimeError if not all
        members come within the timeout; the group may then be reconfigured again, with new handles.
        """
        handles = opts.handles
        handles = list(handles) if isinstance(handles, list) else sorted(handles)
        own = self.get_reconfigure_handle()
        if own not in handles:
            raise ValueError("the handles lack that of this member, of get_reconfigure_handle()")
        if len(set(handles)) < len(handles):
            raise ValueError("a handle is given twice")
        if opts.uuid in self._uuids:
            raise ValueError(f"this group has had the uuid {opts.uuid}; each time needs another")
        addresses = [handle.split("/")[0] for handle in handles]
        self._uuids.add(opts.uuid)
        self._end()
        ring, self._next = self._next[0], None
        rank, limit = handles.index(own), opts.timeout
        name = f"torch.distributed/{opts.uuid}"
        ring.connect(
            name=name,
            secret=hashlib.sha256("\n".join([name, *sorted(handles)]).encode()).digest(),
            rank=rank,
            addresses=addresses,
            timeout=self._limit if limit is None else limit.total_seconds(),
        )
        self._ring, self._members = ring, (rank, len(handles))
        return done_work([])

    def set_timeout(self, timeout):
        """Sets the timeout of operations."""
        self._limit = timeout.total_seconds()

    def abort(self):
        """Ends the group: its operations fail on all ranks. It may be reconfigured."""
        self._ring.abort()

    def shutdown(self):
        """Ends this rank's part of the group, after the operations that have begun."""
        self._ring.shut_down()
        atexit.unregister(self._end)

    def _end(self):
        self._ring.close()
        self._ring, self._members = _NoRing(), (-1, -1)


class _NoRing:
    """In place of a ring, before the first."""

    def close(self):
        pass

    abort = shut_down = close

    def __getattr__(self, name):
        raise RuntimeError("the process group has no members: call reconfigure()")


class _NoPointToPoint:
    def __getattr__(self, name):
        raise NotImplementedError("an ElasticProcessGroup has no send and recv")


def _address_towards(store):
    """Address of this host on the route to the host of the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or socket.gethostname()
    return address_towards(host)


register()
