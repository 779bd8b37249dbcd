"""A function that trains, for the test of ``elasticdl.launch()``."""

import time

import elasticdl


def count(records, pause):
    """Parameter ``i`` counts record ``i``."""
    job = elasticdl.join()

    def update(step, total):
        del step, total
        for i, value in enumerate(job.gradient):
            job.parameters[i] += value

    job.model(records, update=update)
    sampler = job.sampler(records, micro_batch=5)
    for epoch in job.epochs():
        for indices in sampler:
            for index in indices:
                job.gradient[index] += 1.0
            time.sleep(pause)
            job.commit(1.0, reduction="sum")
        job.print("after epoch", epoch, set(job.parameters))
