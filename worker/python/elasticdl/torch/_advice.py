"""What to do about errors of PyTorch that have another reason in a job."""


def advice(error, job):
    """Text for an error that ends the program; None if there is nothing to say."""
    text = str(error)
    worker = job._worker
    if "IterableDataset" in text and "batch_sampler" in text:
        return STREAM
    is_small = worker.drawn and len(worker.drawn[0]) == 1
    if "Expected more than 1 value per channel" in text and is_small:
        options, sampler = worker.core.options, worker._sampler
        of_step = options.global_batch or f"{options.per_worker} of each worker"
        last = f"{sampler.length % options.global_batch}" if options.global_batch else "fewer"
        return (
            f"BatchNorm got a micro-batch of 1 record. A step has {of_step} records (the last one "
            f"of an epoch {last}, unless that is 0), which {worker.progress('world_size')} workers "
            f"divide, in micro-batches of up to {sampler.micro_batch}. Choose --global-batch-size, "
            "--max-workers and micro_batch so that no share leaves a rest of 1, leave the last "
            "records of the data out, or use a module that does not depend on the batch, such as "
            "GroupNorm"
        )
    return None


STREAM = (
    "a job counts each record once, by its index, and an IterableDataset has none. Where the "
    "source is shards that can be read by number, elasticdl.torch.Shards(records, read) is a data "
    "set with indices"
)
