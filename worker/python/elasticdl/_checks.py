"""Checks of arguments."""


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
