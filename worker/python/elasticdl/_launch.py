"""Local jobs of a function, from a notebook or another program."""

import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile


def launch(function, *arguments, **options):
    """Trains with ``function(*arguments)`` in each worker of a local job. Returns its summary.

    ``options``: those of ``elasticdl train``, such as ``num_workers=4, global_batch_size=512`` for
    ``--num-workers 4 --global-batch-size 512``; True for one without a value, a list for one that
    is repeated. The function calls ``join()``, as a program does. What the command prints is
    printed here, and what workers print is in the logs, but for ``job.print()``.

    The workers are processes of their own, which import the module of the function; for one that a
    notebook defines, cloudpickle must be installed. An interrupt stops the job. Raises
    ``RuntimeError`` if the job does not complete.
    """
    if "image" in options:
        raise ValueError(
            "launch() starts a local job; for one in a cluster, put the program in an image, and "
            "start it with elasticdl train --image"
        )
    command = os.environ.get("ELASTICDL") or shutil.which("elasticdl")
    if command is None:
        raise RuntimeError(
            "there is no command elasticdl on the PATH; install it, or set ELASTICDL to its path"
        )
    payload = _pickled(function, arguments)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="elasticdl-"))
    (folder / "function").write_bytes(payload)
    options = {"job_dir": folder / "job", "summary": folder / "summary.json", **options}
    words = [command, "train", "--local", *_words(options), "--", sys.executable, "-c", _PROGRAM]
    words += [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), folder / "function"]
    # An interrupt of a terminal is for this process, which stops the job.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(words, **pipes, text=True, start_new_session=True) as process:
        last = ""
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        raise RuntimeError(f"the job ended with code {process.returncode}: {last}")
    return json.loads(pathlib.Path(options["summary"]).read_text())


def run(path):
    """In a worker: calls the function that is pickled in a file."""
    paths, call = pickle.loads(pathlib.Path(path).read_bytes())
    sys.path[:] = paths
    function, arguments = pickle.loads(call)
    function(*arguments)


def _pickled(function, arguments):
    if not callable(function):
        raise TypeError(f"launch() takes a function, not {type(function).__name__}")
    module = getattr(function, "__module__", "__main__")
    try:
        dumps = pickle.dumps
        if module == "__main__":
            # The module __main__ of a worker is another one.
            from cloudpickle import dumps
        call = dumps((function, arguments))
    except ImportError:
        raise RuntimeError(
            f"{function.__qualname__}() is defined in this notebook or program, which its workers "
            "do not import: install cloudpickle, or move it to a module"
        ) from None
    return pickle.dumps((sys.path, call))


def _words(options):
    words = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if each is True:
                words.append(option)
            elif each is not None and each is not False:
                words.append(f"{option}={each}")
    return words


_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from elasticdl._launch import run; "
    "run(sys.argv[2])"
)
