"""Counts which records touch which rows of the example `ctr`, from the generated data, and compares
with the touches of an exported model. It uses nothing of elasticdl.

    elasticdl train --local --num-workers 3 --training-data clicks:0..20000 --num-epochs 2 \\
        --global-batch-size 256 --export m.safetensors -- target/release/ctr --ids 100000
    python3 .bench/touches.py m.safetensors --records 0..20000 --epochs 2 --ids 100000

It prints one line for each table and exits with 0 if every row has been touched exactly as often as
its records were trained, else with 1.
"""

import argparse
import array
import collections
import json
import pathlib
import struct
import sys

DENSE, CATEGORIES = 13, 26
TABLES = ("wide", "deep")
MASK = (1 << 64) - 1


def mix(number):
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def keys(record, seed, ids):
    """The id of each category of a record, as it stands in the tables."""
    state = mix(seed ^ mix(record))
    # The numbers of the record are drawn first.
    state = (state + DENSE * 0x9E3779B97F4A7C15) & MASK
    for column in range(CATEGORIES):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        uniform = (mix(state) >> 40) / (1 << 24)
        most = max(float(ids), 1e3)
        count = 1e3 * (most / 1e3) ** (column / (CATEGORIES - 1))
        exponent = 1.0 - 1.1
        rank = (1.0 + uniform * (count**exponent - 1.0)) ** (1.0 / exponent)
        yield column << 56 | int(rank)


def header(path):
    """Where the data of a safetensors file begins, and what it consists of."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return 8 + length, json.loads(file.read(length))


def column(path, name, code):
    """A tensor of one dimension."""
    start, tensors = header(path)
    first, end = tensors[name]["data_offsets"]
    values = array.array(code)
    with open(path, "rb") as file:
        file.seek(start + first)
        values.frombytes(file.read(end - first))
    return values


def touches(model, table):
    """The touches of each row of a table, by its id."""
    note = json.loads(header(model)[1]["__metadata__"]["elasticdl.tables"])
    counted = {}
    for part in note["parts"]:
        path = pathlib.Path(model).parent / part["file"]
        ids = column(path, f"{table}.ids", "Q")
        for row, count in zip(ids, column(path, f"{table}.touches", "I"), strict=True):
            if row in counted:
                sys.exit(f"{path}: row {row} is there twice")
            counted[row] = count
    return counted


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", help="file that --export has written")
    parser.add_argument("--records", required=True, metavar="FROM..TO")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--ids", type=int, default=100_000)
    parser.add_argument("--data-seed", type=int, default=1)
    options = parser.parse_args()
    first, _, end = options.records.partition("..")
    expected = collections.Counter()
    for record in range(int(first), int(end)):
        expected.update(set(keys(record, options.data_seed, options.ids)))
    expected = {row: count * options.epochs for row, count in expected.items()}
    differ = False
    for table in TABLES:
        counted = touches(options.model, table)
        wrong = [
            row
            for row in expected.keys() | counted.keys()
            if expected.get(row, 0) != counted.get(row, 0)
        ]
        totals = sum(expected.values()), sum(counted.values())
        print(f"{table}: {len(counted)} rows, touches {totals[0]} expected, {totals[1]} counted")
        for row in sorted(wrong)[:5]:
            print(f"  row {row}: {expected.get(row, 0)} expected, {counted.get(row, 0)} counted")
        differ |= bool(wrong)
    sys.exit(differ)


if __name__ == "__main__":
    main()
