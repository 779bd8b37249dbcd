"""Checks of arguments, and of what a program does."""

import dis
import os
import traceback


def check_count(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an int")
    if not least <= value < 1 << 63:
        raise ValueError(f"{name} is {value}; it must be at least {least} and below 2**63")


def check_option(name, value, of_job, option):
    if value is not None and value != of_job:
        raise ValueError(
            f"{name} is {value}, but the job was started with {option} {of_job}; make them equal, "
            f"or leave {name} out"
        )


def is_refusal(trace):
    """Whether an exception with this traceback was raised by a statement of this package: it
    refuses what the program does, as it would on each worker."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    is_raise = code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raise and _is_ours(code.co_filename)


def place_of(trace):
    """Where the program was when an exception was raised, for a message."""
    frames = traceback.extract_tb(trace)
    last = ([at for at in frames if not _is_ours(at.filename)] or frames)[-1:]
    return "".join(f" ({at.filename}, line {at.lineno})" for at in last)


def _is_ours(filename):
    return filename.startswith(_PACKAGE)


_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
