"""PyTorch's own tests of backends of ``torch.distributed``, which its wheel contains, with the
backend ``elasticdl``. `.bench/c10d-tests` runs it.

Arguments: names of tests, or ``--all``; without, those that pass. Needs the package expecttest.
"""

import os
import sys
import unittest

os.environ.setdefault("BACKEND", "elasticdl")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("TEMP_DIR", "/tmp")

import torch  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402
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


PASS = """
"""


def main():
    """Runs the tests, and prints which of them fail."""
    # Features by backend, as for gloo.
    for features in distributed_test.DistTestCases.backend_feature.values():
        if "gloo" in features:
            features.add("elasticdl")
    names = sys.argv[1:] or PASS.split()
    if names == ["--all"]:
        names = [name for name in dir(ElasticTest) if name.startswith("test_")]
    suite = unittest.TestSuite(ElasticTest(name) for name in names)
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
