"""The generated clicks of the example `ctr`, in NumPy: record `i` depends on the seed and `i`."""

import numpy as np

SEED, IDS = np.uint64(1), 100_000
DENSE, CATEGORIES = 13, 26
# Ids of each category.
COUNTS = 1e3 * (IDS / 1e3) ** (np.arange(CATEGORIES) / (CATEGORIES - 1))


def clicks(records):
    """Labels ``[records]``, numbers ``[records, DENSE]`` and ids ``[records, CATEGORIES]``."""
    # Numbers of 64 bits wrap, as they do in Rust.
    with np.errstate(over="ignore"):
        return _clicks(np.asarray(records))


def _clicks(records):
    state = _mix(SEED ^ _mix(records.astype(np.uint64)))
    dense = np.stack([_uniform(state, 1 + i) * 2 - 1 for i in range(DENSE)], 1)
    exponent = 1 - 1.1
    logit = np.full(len(records), -1.0, np.float32)
    zero = np.zeros(len(records), np.uint64)
    for i in range(DENSE):
        logit += dense[:, i] * _weight(i, zero) * 0.4
    ids = []
    for i in range(CATEGORIES):
        draw = _uniform(state, 1 + DENSE + i).astype(np.float64)
        rank = (1 + draw * (COUNTS[i] ** exponent - 1)) ** (1 / exponent)
        ids.append(rank.astype(np.uint64))
        logit += _weight(100 + i, ids[i]) * 0.5
    for a, b in [(0, 1), (2, 3), (4, 5)]:
        logit += _weight(200 + a, ids[a]) * _weight(200 + b, ids[b])
    labels = _uniform(state, 1 + DENSE + CATEGORIES) < 1 / (1 + np.exp(-logit))
    return labels.astype(np.float32), dense, np.stack(ids, 1).astype(np.int64)


def _mix(number):
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


def _uniform(state, draw):
    state = state + np.uint64(draw) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


def _weight(column, ids):
    column = np.full_like(ids, column)
    return _uniform(_mix(SEED ^ _mix(column ^ _mix(ids))), 1) * 2 - 1
