"""A program that takes only its data from elasticdl, for the tests of whole jobs."""

import json
import os
import pathlib
import sys
import time

import elasticdl

records, micros, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
sampler = elasticdl.sampler(records, micro_batch=7)
if len(sys.argv) > 4:
    sampler.load_state_dict(json.loads(pathlib.Path(sys.argv[4]).read_text()))
    assert sampler.state_dict()["records"] > 0
file = os.open(folder / "lines", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for epoch, indices in ((epoch, indices) for epoch in sampler.epochs() for indices in sampler):
    assert {record.epoch for record in indices} == {epoch}
    time.sleep(micros * len(indices) / 1e6)
    place = (indices[0].epoch * records, *indices)
    os.write(file, (" ".join(str(number) for number in place) + "\n").encode())
    if sampler.commit():
        at = sampler.state_dict()
        # Every worker writes the same; one of a killed worker is not renamed.
        new = folder / f"state-{os.getpid()}"
        new.write_text(json.dumps(at))
        new.rename(folder / f"state-{at['records']}")
