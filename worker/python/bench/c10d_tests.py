"""PyTorch's own tests of backends of ``torch.distributed``, which its wheel contains, with the
backend ``elasticdl``. `.bench/c10d-tests` runs it.

Arguments: names of tests, or ``--all``; without, all but those that can't pass. Needs the package
expecttest.
"""

import os
import sys
import unittest

os.environ.setdefault("BACKEND", "elasticdl")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("TEMP_DIR", "/tmp")

import torch  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

# Read when the tests are imported. The features on GPUs are left out.
for feature in ("ddp", "plugin", "subgroup"):
    DistTestCases.backend_feature[feature].add("elasticdl")

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)

import elasticdl.torch.distributed  # noqa: E402, F401


class ElasticTest(TestDistBackend, DistributedTest._DistTestBase):
    """One process of the test for each rank."""

    def setUp(self):
        super().setUp()
        # A forked process has PyTorch already; this one has no threads that it would miss.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


# What a backend in Python can't do: PyTorch 2.15 passes neither the end of a work object nor its
# source to those that hold it, and calls every backend that it does not know `custom`.
EXCEPT = """
test_ddp_logging_data_cpu
test_irecv
test_isend
test_isend_autograd_profiler
test_isend_torch_profiler
test_send_recv_any_source
test_send_recv_any_source_autograd_profiler
test_send_recv_any_source_torch_profiler
"""


def main():
    """Runs the tests, and prints which of them fail."""
    every = [name for name in dir(ElasticTest) if name.startswith("test_")]
    names = sys.argv[1:] or [name for name in every if name not in EXCEPT.split()]
    if names == ["--all"]:
        names = every
    suite = unittest.TestSuite(ElasticTest(name) for name in names)
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
