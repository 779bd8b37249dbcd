"""Tensors from one rank to another, by way of the store of a process group.

A ring links neighbours only. The store links all ranks, but has one host, which every tensor
passes: it is made for small ones.
"""

import ctypes
import threading
import time


class PointToPoint:
    """The tensors that one rank sends and receives."""

    def __init__(self, store, rank):
        self._store = store
        self._rank = rank
        self._lock = threading.Lock()
        self._counts = {}
        # Of each tensor that is awaited: its key in the store, its end, its future, its deadline.
        self._awaited = []
        self._receiver = None
        self._is_over = False

    def send(self, tensor, to, tag):
        """Puts a copy of the tensor into the store."""
        flat = tensor.contiguous()
        data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
        self._store.set(self._next_key(self._rank, to, tag), data)

    def receive(self, source, tag, limit, end, future):
        """Sets the future to what ``end(data)`` returns for the data of the next tensor, or to an
        error. ``limit`` is in seconds."""
        key = self._next_key(source, self._rank, tag)
        with self._lock:
            self._awaited.append((key, end, future, time.monotonic() + limit))
            if self._receiver is None:
                self._receiver = threading.Thread(target=self._run, daemon=True)
                self._receiver.start()

    def end(self):
        """Fails what is still awaited."""
        self._is_over = True

    def _next_key(self, source, to, tag):
        """Tensors of one source, destination and tag are received in the order of their sends."""
        with self._lock:
            number = self._counts.get((source, to, tag), 0)
            self._counts[source, to, tag] = number + 1
        return f"elasticdl/tensor/{source}/{to}/{tag}/{number}"

    def _run(self):
        """Receives until nothing is awaited. The store is polled, since it serves only one of this
        process's threads at a time: a thread that waited in it would keep all others from it."""
        while True:
            with self._lock:
                awaited = list(self._awaited)
                if not awaited:
                    self._receiver = None
                    return
            done = [entry for entry in awaited if self._is_done(*entry)]
            with self._lock:
                self._awaited = [entry for entry in self._awaited if entry not in done]
            if not done:
                time.sleep(POLL_S)

    def _is_done(self, key, end, future, deadline):
        try:
            if not self._store.check([key]):
                if self._is_over:
                    raise RuntimeError("the process group ended before the tensor came")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no tensor has come as {key}")
                return False
            data = self._store.get(key)
            self._store.delete_key(key)
            result = end(data)
        except Exception as error:
            result = error
        future.set_result(result)
        return True


POLL_S = 0.001
