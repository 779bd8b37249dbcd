"""A ring of the workers of a job, beside that of the trainer, for what their loops exchange.

Each worker tells the address at which it listens, and a secret, with its gradients. The tally of a
step says the same to all workers that commit it, so they know without a further word who meets
whom, and whether a ring that they have goes on::

    step s      tally: addresses of workers 1, 2, 3 ─► each of them knows all three
    a loop      ring of 1, 2, 3
    step s + 1  tally: the same workers             ─► the ring goes on
    step s + 2  tally: workers 1, 2, 4              ─► the ring ends, and each tells a new address
    step s + 3                                      ─► a ring of 1, 2, 4 can be made

**Invariant:** no result depends on it. A worker without a ring does by itself what the others would
do for it.
"""

import atexit
import hashlib
import os
import secrets
import socket
import threading

from .. import _elasticdl


class Meeting:
    """The ring of this worker and the others that committed the last step."""

    def __init__(self, worker):
        self._worker = worker
        self._is_declared = False
        # A ring that is not connected, and what others have to know of it.
        self._next = self._told = None
        # Of the last commit: what its workers have told, and whether all have told a new address.
        self._members, self._are_new = [], False
        # The ring that is connected, and its members.
        self._ring, self._connected = None, []

    def declare(self):
        """The program has loops for a ring."""
        if not self._is_declared:
            self._is_declared = True
            atexit.register(self.leave)

    def tell(self):
        """What this worker tells the others in a step, as names for its tally."""
        core = self._worker.core
        if not self._is_declared or core.is_alone:
            return []
        if self._ring is None and self._next is None:
            master = os.environ["ELASTICDL_MASTER"].rsplit(":", 1)[0]
            self._next = _elasticdl.Ring(address_towards(master.strip("[]")))
            self._told = core.id, self._next.address, secrets.token_hex(16)
        state = "connected" if self._ring is not None else "new"
        return [(_TOLD + " ".join(map(str, (*self._told, state))), 1)]

    def commit(self, tally):
        """A step is committed. ``tally``: what the workers have told in it."""
        told = [name.removeprefix(_TOLD).split(" ") for name in tally if name.startswith(_TOLD)]
        self._members = sorted((int(number), *rest) for number, *rest, _ in told)
        self._are_new = all(state == "new" for *_, state in told)
        if self._ring is not None and self._members != self._connected:
            self.leave()

    def connect(self):
        """This worker's part of the ring, a :class:`Ring`; None if it has none."""
        if self._ring is None or self._members != self._connected:
            if len(self._members) < 2 or not self._are_new or self._told not in self._members:
                return None
            ring, self._next = self._next, None
            if ring is None or not _connects(ring, self._members, self._told):
                return None
            self._ring, self._connected = ring, self._members
        return Ring(self, self._ring, self._members.index(self._told), len(self._members))

    def leave(self):
        """Ends the ring, for all its members."""
        if self._ring is not None:
            self._ring.close()
        self._ring, self._connected = None, []


class Ring:
    """A worker's part of a ring."""

    def __init__(self, meeting, ring, rank, size):
        self.rank, self.size = rank, size
        self._meeting = meeting
        self._ring = ring

    def gather(self, data):
        """The bytes that each rank gives, in their order; None if a rank is lost or does not give
        any in time. The ring has then ended."""
        lengths = self._all(bytearray(len(data).to_bytes(8, "little")))
        if lengths is None:
            return None
        lengths = [int.from_bytes(each, "little") for each in lengths]
        parts = self._all(bytearray(data.ljust(max(lengths), b"\0")))
        return parts and [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def leave(self):
        """Ends the ring, for all its members."""
        self._meeting.leave()

    def _all(self, data):
        ring, found, over = self._ring, [], threading.Event()

        def done(error):
            # The error itself would keep the ring, by its traceback, until a garbage collection.
            found.append(error and str(error))
            over.set()

        try:
            ring.begin_call(lambda: found.append(ring.all_gather(data)), _LIMIT, done)
            over.wait()
        except RuntimeError as error:
            found.append(str(error))
        *gathered, error = found
        if error is None:
            return gathered[0]
        _elasticdl.warn(f"a loop's ring has ended: {error}")
        self.leave()
        return None


def _connects(ring, members, own):
    addresses = [address for _, address, _ in members]
    try:
        for address in addresses:
            # One that has ended would be waited for.
            if address != own[1]:
                host, port = address.rsplit(":", 1)
                socket.create_connection((host.strip("[]"), port), _CONNECT_LIMIT).close()
        ring.connect(
            name=f"loops of {members[0][0]}",
            secret=hashlib.sha256(repr(members).encode()).digest(),
            rank=members.index(own),
            addresses=addresses,
            timeout=_CONNECT_LIMIT,
        )
    except (OSError, RuntimeError) as error:
        _elasticdl.warn(f"not all workers are in this loop: {error}")
        return False
    return True


def address_towards(host):
    """The address of this host on the route to another one, at which others reach it."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing; it makes the kernel choose a route.
        probe.connect(address)
        return probe.getsockname()[0]


_TOLD = "meets "
# Seconds for which a worker waits for others at the beginning of a loop, and within it.
_CONNECT_LIMIT = 30
_LIMIT = 120
