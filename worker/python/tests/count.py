"""A program whose parameters count records, for the tests of whole jobs.

After training, parameter ``i`` is the number of times that record ``i`` was absorbed, so the model
itself proves that records count exactly once.
"""

import sys
import time

import elasticdl

records, micros, counts = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
job = elasticdl.join()


def update(step, total):
    parameters, gradient = job.parameters, job.gradient
    for i, value in enumerate(gradient):
        if value:
            parameters[i] += value


job.model(records, update=update)
sampler = job.sampler(records, micro_batch=7)
for indices in (indices for _ in job.epochs() for indices in sampler):
    gradient = job.gradient
    for index in indices:
        gradient[index] += 1.0
    time.sleep(micros * len(indices) / 1e6)
    job.report("seen", 2.0)
    job.commit(1.0, reduction="sum")

with open(counts, "a") as file:
    file.write(f"{min(job.parameters)} {max(job.parameters)}\n")
