"""Runs short programs, each in a process of its own that begins with PyTorch loaded, which takes
seconds."""

import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile


def run(program):
    """The end of a process that has run this text, with its code, output and errors."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "elasticdl.torch"])
    with tempfile.TemporaryDirectory() as folder:
        texts = [pathlib.Path(folder, name) for name in ("output", "errors")]
        child = context.Process(target=_execute, args=(program, texts))
        child.start()
        child.join(TIMEOUT)
        if child.is_alive():
            child.kill()
            raise TimeoutError(texts[1].read_text())
        shown = [text.read_text() for text in texts]
    return subprocess.CompletedProcess(program, child.exitcode, *shown)


def _execute(program, texts):
    for number, text in enumerate(texts, 1):
        with open(text, "w") as file:
            os.dup2(file.fileno(), number)
    for name in [name for name in os.environ if name.startswith("ELASTICDL_")]:
        del os.environ[name]
    sys.argv = ["-c"]
    # As of a process that has not been forked here.
    multiprocessing.set_start_method("fork", force=True)
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


TIMEOUT = 300
