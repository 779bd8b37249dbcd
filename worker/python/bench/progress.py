"""What the counting programs of all systems share, whatever their framework."""

import time


def log_step(path, step, workers):
    """Notes that a step, from 1, was committed by a group of this size."""
    with open(f"{path}.steps", "a") as file:
        file.write(f"{time.monotonic():.6f} {step} {workers}\n")


RECORDS_PER_STEP = 64
MILLISECONDS_PER_RECORD = 2.0
