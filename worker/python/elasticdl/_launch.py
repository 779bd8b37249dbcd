"""Jobs of a function, from a notebook or another program."""

import base64
import collections
import contextlib
import itertools
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile


def launch(function, *arguments, **options):
    """Trains with ``function(*arguments)`` in each worker of a job. Returns its summary.

    ``options``: those of ``elasticdl train``, such as ``num_workers=4, global_batch_size=512`` for
    ``--num-workers 4 --global-batch-size 512``; True for one without a value, a list for one that
    is repeated. The function calls ``join()``, as a program does. What the command prints is
    printed here, and what workers print is in the logs, but for ``job.print()`` of a local job.

    The workers are processes of their own, which import the module of the function; for one that a
    notebook defines, cloudpickle must be installed. An interrupt stops the job.

    With ``image=`` the workers are pods of that image. It has this package, that of the function's
    module, and Python as ``python3``, of this version if cloudpickle is needed. The function and
    its arguments are a part of the pods' command, in plain, and at most 64 KiB. An interrupt does
    not stop such a job.

    Raises ``RuntimeError`` if the job does not complete. It says where the logs of a local job are.
    """
    command = os.environ.get("ELASTICDL") or shutil.which("elasticdl")
    if command is None:
        raise RuntimeError(
            "there is no command elasticdl on the PATH; install it, or set ELASTICDL to its path"
        )
    for option in "detach", "dry_run", "local":
        if options.get(option):
            raise ValueError(f"launch() waits for a job and decides where it runs: no {option}=")
    call = _pickled(function, arguments)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="elasticdl-"))
    try:
        return _run(command, call, folder, options)
    finally:
        # What stays is the directory of a job that was started.
        for name in "function", "summary.json":
            folder.joinpath(name).unlink(missing_ok=True)
        for path in folder / "job", folder:
            with contextlib.suppress(OSError):
                path.rmdir()


def _run(command, call, folder, options):
    if options.get("image") is None:
        (folder / "function").write_bytes(pickle.dumps((sys.path, call)))
        options = {"job_dir": folder / "job", **options}
        summary = pathlib.Path(options["job_dir"], "summary.json")
        program = [sys.executable, "-c", _PROGRAM]
        program += [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
        program += [folder / "function"]
        words = [command, "train", "--local"]
    else:
        options = {"summary": folder / "summary.json", **options}
        summary = pathlib.Path(options["summary"])
        program = ["python3", "-c", _PROGRAM_OF_IMAGE, _text(call)]
        words = [command, "train"]
    words += [*_words(options), "--", *program]
    # An interrupt of a terminal is for this process, which stops the job.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    lines = collections.deque(maxlen=_LINES_KEPT)
    with subprocess.Popen(words, **pipes, text=True, start_new_session=True) as process:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.strip())
        except BaseException:
            process.terminate()
            # It says what becomes of the job.
            print(process.stdout.read(), end="", flush=True)
            raise
    if process.returncode != 0:
        logs = summary.parent / "logs"
        where = f"; what the workers printed is in {logs}" if logs.exists() else ""
        error = _error_of(list(lines))
        raise RuntimeError(f"the job ended with code {process.returncode}: {error}{where}")
    return json.loads(summary.read_text())


def _error_of(lines):
    """The error among the last lines of a command: that of an option has several, and how to use
    the command follows."""
    starts = [at for at, line in enumerate(lines) if line.startswith("error:")]
    if not starts:
        return next(filter(None, reversed(lines)), "it printed nothing")
    is_error = lambda line: not line.startswith(("Usage:", "For more information"))
    error = itertools.takewhile(is_error, lines[starts[0] :])
    return "; ".join(filter(None, error)).removeprefix("error: ")


def run(path):
    """In a worker: calls the function that is pickled in a file."""
    paths, call = pickle.loads(pathlib.Path(path).read_bytes())
    sys.path[:] = paths
    _call(call)


def run_text(text):
    """In a worker of an image: calls the function that is pickled in an argument."""
    _call(base64.urlsafe_b64decode(text))


def _call(call):
    version, is_code, pickled = pickle.loads(call)
    if is_code and version != sys.version_info[:2]:
        ours = "{}.{}".format(*sys.version_info)
        raise RuntimeError(
            f"this function is of Python {version[0]}.{version[1]}, and the image has {ours}, "
            "which can't load it: use an image of the same version, or move the function to a "
            "module of the image"
        )
    function, arguments = pickle.loads(pickled)
    function(*arguments)


def _pickled(function, arguments):
    if not callable(function):
        raise TypeError(f"launch() takes a function, not {type(function).__name__}")
    # The module __main__ of a worker is another one.
    is_code = getattr(function, "__module__", "__main__") == "__main__"
    try:
        dumps = pickle.dumps
        if is_code:
            from cloudpickle import dumps
        call = dumps((function, arguments))
    except ImportError:
        raise RuntimeError(
            f"{function.__qualname__}() is defined in this notebook or program, which its workers "
            "do not import: install cloudpickle, or move it to a module"
        ) from None
    return pickle.dumps((sys.version_info[:2], is_code, call))


def _text(call):
    # Without the `$` that a pod's command must not contain.
    text = base64.urlsafe_b64encode(call).decode()
    if len(text) > 64 << 10:
        raise ValueError(
            f"the function and its arguments take {len(text) >> 10} KiB, and a job in a cluster "
            "carries at most 64: move the function to a module of the image, and let it read its "
            "data from files or a store"
        )
    return text


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


_LINES_KEPT = 20
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from elasticdl._launch import run; "
    "run(sys.argv[2])"
)
_PROGRAM_OF_IMAGE = "import sys; from elasticdl._launch import run_text; run_text(sys.argv[1])"
