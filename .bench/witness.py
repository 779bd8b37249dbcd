"""Says whether each record of a job counts exactly once, by what its user has: the data, the
options, the summary, and the exported model, if that counts records. It uses nothing of elasticdl.

    elasticdl train --local --num-workers 3 --training-data clicks:0..20000 --num-epochs 2 \\
        --global-batch-size 256 --export m.safetensors -- target/release/ctr --ids 100000
    python3 .bench/witness.py m.safetensors --training-data clicks:0..20000 --num-epochs 2

Data `clicks:FROM..TO` are records of the example `ctr`, which touch rows of both of its tables. A
folder has records of the tests' model `counting`, numbers of 8 bytes: parameter i counts record i,
and so does row i of the table `counts`, if there is one. With --same-as, the model has to have the
bytes of that one instead, tables included.

It prints a line for each counter, and what is wrong: records that are missing, repeated, or foreign
to the data. The exit code is 1 if there are any.
"""

import argparse
import array
import collections
import itertools
import json
import pathlib
import struct
import sys

DENSE, CATEGORIES = 13, 26
MASK = (1 << 64) - 1
SHOWN = 5


def mix(number):
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def keys(record, seed, ids):
    """The id of each category of a click, as it stands in the tables."""
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
    """The numbers of a tensor."""
    start, tensors = header(path)
    first, end = tensors[name]["data_offsets"]
    values = array.array(code)
    with open(path, "rb") as file:
        file.seek(start + first)
        values.frombytes(file.read(end - first))
    return values


def parts(model):
    """The files of a model's tables."""
    note = header(model)[1].get("__metadata__", {}).get("elasticdl.tables", '{"parts": []}')
    return [pathlib.Path(model).parent / part["file"] for part in json.loads(note)["parts"]]


def counted(model, name):
    """How often the model has counted each record, or touched each row of a table, by its id."""
    if name == "parameters":
        return {i: count for i, count in enumerate(column(model, name, "f")) if count}
    rows = {}
    for path in parts(model):
        ids, touches = column(path, f"{name}.ids", "Q"), column(path, f"{name}.touches", "I")
        for row, count in zip(ids, touches, strict=True):
            # A row that is there twice counts twice.
            rows[row] = rows.get(row, 0) + count
    return rows


def once(options):
    """The number of records of the data, and what they add to each counter."""
    if not options.training_data.startswith("clicks:"):
        records = array.array("Q")
        for path in pathlib.Path(options.training_data).iterdir():
            records.frombytes(path.read_bytes())
        names = ["parameters", "counts"] if parts(options.model) else ["parameters"]
        return len(records), dict.fromkeys(names, collections.Counter(records))
    first, _, end = options.training_data.removeprefix("clicks:").partition("..")
    touched = collections.Counter()
    for record in range(int(first), int(end)):
        touched.update(set(keys(record, options.data_seed, options.ids)))
    return int(end) - int(first), {"wide": touched, "deep": touched}


def wrong_counts(expected, found):
    for number in sorted(expected.keys() | found.keys()):
        want, have = expected.get(number, 0), found.get(number, 0)
        if want != have:
            what = "foreign" if not want else "missing" if have < want else "repeated"
            yield f"  {what}: {number} is expected {want} times and counted {have:g} times"


def wrong_summary(summary, records):
    exact = {"expected": records, "counted": records, "missing": 0, "repeated": 0}
    found = {key: summary["records"][key] for key in exact}
    if (summary["state"], found) != ("completed", exact):
        yield f"  the summary says {summary['state']}, {found}, and {records} are expected"
    touches = summary.get("row_touches") or {"missing": 0, "repeated": 0}
    if touches["missing"] or touches["repeated"]:
        yield f"  the summary says {touches} of rows"


def files(model):
    """The contents of a model's files, in the order of their names."""
    return [path.read_bytes() for path in [pathlib.Path(model), *sorted(parts(model))]]


def judge(words):
    """Lines to print, and whether they say that something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", help="file that --export has written")
    parser.add_argument("--training-data", required=True, help="clicks:FROM..TO, or a folder")
    parser.add_argument("--num-epochs", type=int, default=1)
    parser.add_argument("--summary", help="the summary.json of the job")
    parser.add_argument("--same-as", metavar="MODEL", help="the model must have its bytes")
    parser.add_argument("--ids", type=int, default=100_000, help="of `ctr`")
    parser.add_argument("--data-seed", type=int, default=1, help="of `ctr`")
    options = parser.parse_args(words)
    lines, wrong = [], []
    records, counters = once(options)
    if options.summary:
        summary = json.loads(pathlib.Path(options.summary).read_text())
        wrong += wrong_summary(summary, records * options.num_epochs)
    if options.same_as:
        counters = {}
        if files(options.model) != files(options.same_as):
            wrong.append(f"  {options.model} differs from {options.same_as}")
    for name, expected in counters.items():
        expected = {number: count * options.num_epochs for number, count in expected.items()}
        found = counted(options.model, name)
        totals = f"{sum(expected.values())} expected, {sum(found.values()):.0f} counted"
        lines.append(f"{name}: {len(found)} counters, {totals}")
        wrong += itertools.islice(wrong_counts(expected, found), SHOWN)
    return lines + wrong, bool(wrong)


if __name__ == "__main__":
    printed, is_wrong = judge(sys.argv[1:])
    print("\n".join(printed) or "the models are equal")
    sys.exit(is_wrong)
