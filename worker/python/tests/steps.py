"""A program that writes down which records each step has, for the tests of whole jobs.

A line is a step, followed by the records of a micro-batch of it. A worker writes the line before it
delivers the micro-batch, so a worker that is killed may have written one that others compute again.
"""

import os
import sys
import time

import elasticdl

records, micros, steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
job = elasticdl.join()
job.model(2, update=lambda step, total: None)
options = {"global_batch": 48, "epochs": 2, "seed": 5} if len(sys.argv) > 4 else {}
file = os.open(steps, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sampler = job.sampler(records, micro_batch=7, **options)
for indices in (indices for _ in job.epochs() for indices in sampler):
    assert indices == job.micro_batch
    time.sleep(micros * len(indices) / 1e6)
    # One call, so that lines of several workers do not mix.
    os.write(file, (" ".join(str(number) for number in [job.step, *indices]) + "\n").encode())
    job.commit()
