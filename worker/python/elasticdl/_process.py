"""What a process does for its job beside training."""

import atexit
import faulthandler
import fcntl
import os
import signal
import sys
import threading
import traceback

from . import _elasticdl
from ._checks import is_refusal, place_of


class Process:
    """The process of a worker, which joins one job."""

    def __init__(self):
        self.job = None
        self.pid = None
        self.has_failed = False
        self.excepthook = None

    def join(self, kind):
        """Joins the job that launched this process. Returns it, a ``kind(core)``."""
        if self.job is not None and not self.is_alone():
            raise RuntimeError("this process has joined its job already; call join() once")
        if _elasticdl.is_supervisor():
            _become_supervisor()
        core = _elasticdl.Core.join()
        if core is not None:
            _watch_stacks()
        job = kind(core)
        self.enter(job)
        return job

    def is_alone(self):
        """Whether no job has launched this process. It may then join again, as a cell of a
        notebook does that is run a second time."""
        core = self.job._worker.core
        return core is None or core.is_alone

    def enter(self, job):
        has_entered = self.job is not None
        self.job, self.pid, self.has_failed = job, os.getpid(), False
        if has_entered:
            return
        self.excepthook = sys.excepthook
        sys.excepthook = self.on_exception
        atexit.register(self.on_exit)
        os.register_at_fork(after_in_child=self.on_fork)

    def on_exception(self, kind, error, trace):
        if os.getpid() == self.pid:
            note = self.job._advice(error)
            if note is not None:
                error.add_note(f"elasticdl: {note}")
            # The traceback follows in the worker's log.
            text = "".join(traceback.format_exception_only(kind, error)).strip()
            self.fail(text + place_of(trace), is_refused=is_refusal(trace))
        self.excepthook(kind, error, trace)

    def on_exit(self):
        worker = self.job._worker
        if os.getpid() != self.pid or worker.ended:
            return
        text = "the program ended before its job; the loop over the data must not be left"
        if len(worker.drawn) > 1:
            text += (
                f", and of the micro-batches that were drawn, {len(worker.drawn)} had no step: "
                "each of them needs its own"
            )
        if worker.started is not None and worker.core.is_alone and not self.has_failed:
            print(f"elasticdl: {text}", file=sys.stderr)
        self.fail(text)

    def fail(self, text, is_refused=False):
        self.has_failed = True
        core = self.job._worker.core
        if core is not None:
            try:
                core.fail(text, is_refused)
            except RuntimeError:
                # Another thread uses it; the process ends without a report.
                pass

    def on_fork(self):
        """In a forked process, such as a worker of a DataLoader."""
        if threading.current_thread() is threading.main_thread():
            _elasticdl.die_with_parent()
            # The handler of the native code is of the parent process.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def _become_supervisor():
    """Replaces this process, the first of a pod of several workers, by one that starts them.

    It frees what the program has imported and opened, such as memory of a GPU.
    """
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from elasticdl import _elasticdl; "
        "sys.exit(_elasticdl.supervise(sys.argv[2:]))"
    )
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-c", code, packages, *program])


def _watch_stacks():
    """Makes the stacks of all Python threads a part of what this worker reports of itself.

    A thread writes them on request. The handler of SIGUSR2, unless the program has one, writes them
    when other code does not let go of the interpreter's lock.
    """
    ask, asking = os.pipe()
    told, telling = os.pipe()
    dump = os.memfd_create("stacks")
    # The native code empties the file, and writes go to its end.
    fcntl.fcntl(dump, fcntl.F_SETFL, os.O_APPEND)
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, file=dump)
    _elasticdl.watch_stacks(*(f"/proc/self/fd/{fd}" for fd in (asking, told, dump)), signal.SIGUSR2)
    os.close(asking)
    os.close(told)
    name = "elasticdl-stacks"
    threading.Thread(target=_serve_stacks, args=(ask, telling, dump), name=name, daemon=True).start()


def _serve_stacks(ask, telling, dump):
    while os.read(ask, 1):
        faulthandler.dump_traceback(file=dump)
        os.write(telling, b"1")


process = Process()
