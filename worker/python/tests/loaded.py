"""Starts the programs of workers in processes that have PyTorch loaded, which takes 6 s of a core:
``loaded.py serve SOCKET`` loads it, and forks for each worker.

The process of a worker is ``loaded.py SOCKET PROGRAM...``. It passes its environment, its streams
and its signals on to the fork, which dies with it, and ends as the fork does.
"""

import atexit
import fcntl
import gc
import json
import os
import resource
import runpy
import select
import selectors
import signal
import socket
import sys
import threading


def serve(path):
    """Forks until it is ended. Returns in the forks."""
    import numpy
    import torch
    import torch._dynamo  # The first step of an optimizer loads it.

    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    # By the descriptor that tells its end: the process and who waits for it.
    running = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not listener:
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                pid, client = running.pop(key.fileobj)
                _tell(client, os.waitpid(pid, 0)[1])
                client.close()
                continue
            client, _ = listener.accept()
            text, descriptors, *_ = socket.recv_fds(client, 1 << 16, 4)
            while not text.endswith(b"\n"):
                text += client.recv(1 << 16)
            pid = os.fork()
            if pid == 0:
                others = [other for _, other in running.values()]
                for opened in (selector, listener, client, *others):
                    opened.close()
                _become(json.loads(text), descriptors)
                numpy.random.seed()
                torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
                return
            for descriptor in descriptors:
                os.close(descriptor)
            _tell(client, pid)
            end = os.pidfd_open(pid)
            running[end] = pid, client
            selector.register(end, selectors.EVENT_READ)


def _tell(client, number):
    try:
        client.sendall(b"%d\n" % number)
    except BrokenPipeError:
        # Its process has been killed.
        pass


def _become(request, descriptors):
    """Makes this fork the process of a worker."""
    *streams, alive = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # The kernel kills this process when the other end is closed.
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    if select.select([alive], [], [], 0)[0]:
        os._exit(1)
    os.setpgid(0, request["group"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["program"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))


def follow(path, program):
    """Has a program run in a fork, and ends as it does."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    request = {
        "program": program,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "group": os.getpgrp(),
    }
    alive, held = os.pipe()
    socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2, alive])
    os.close(alive)
    answers = server.makefile()
    pid = int(answers.readline())
    for number in signals:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    status = int(answers.readline())
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os.close(held)
    os._exit(os.WEXITSTATUS(status))


def run(program):
    """Ends as Python does after a program, but for the modules, whose end takes 2 s."""
    code = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# The module fcntl has no name for it.
F_SETSIG = 10

if __name__ == "__main__":
    if sys.argv[1] != "serve":
        follow(sys.argv[1], sys.argv[2:])
    serve(sys.argv[2])
    run(sys.argv[0])
