"""Tests of the backend of ``torch.distributed``, with PyTorch."""

import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import types
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("PyTorch is not installed; .ci/python installs it and runs these tests")

import torch

from elasticdl.torch import _devices
from jobs import HERE


FAKE_CUDA = HERE / "on_fake_cuda.py"
STAND_INS = os.environ.get("ELASTICDL_STAND_INS")
FAKES = {
    "LD_LIBRARY_PATH": f"{STAND_INS}",
    # PyTorch has loaded the real one.
    "ELASTICDL_NCCL": f"{STAND_INS}/libnccl.so.2",
    # The end of Python waits for NCCL, which takes longer than it.
    "STAND_IN_CHECKS_EXIT": "1",
    "STAND_IN_RELEASE_MS": "1000",
}
needs_stand_ins = unittest.skipUnless(
    STAND_INS, "set ELASTICDL_STAND_INS to their folder, as .ci/python does"
)


def run_ranks(size, *program, **variables):
    """Runs a program as each rank of a group. Returns exit codes, outputs and errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(size):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            **variables,
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, *map(str, program)]
        ranks.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        ended = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, ended)]


class Backend(unittest.TestCase):
    """Groups of processes."""

    def check_every_collective(self, size, *program, **variables):
        ended = run_ranks(size, *program, HERE / "collectives.py", **variables)
        for rank, (code, output, error) in enumerate(ended):
            self.assertEqual((code, output), (0, f"passed {rank}\n"), error)

    def test_every_collective_gives_the_defined_result(self):
        self.check_every_collective(3)

    @needs_stand_ins
    def test_every_collective_gives_the_defined_result_for_tensors_on_gpus(self):
        self.check_every_collective(3, FAKE_CUDA, **FAKES)

    @needs_stand_ins
    def test_every_collective_gives_the_defined_result_on_any_device_without_nccl(self):
        variables = {**FAKES, "FAKE_CUDA": "some", "ELASTICDL_NCCL": "off"}
        self.check_every_collective(2, FAKE_CUDA, **variables)

    @needs_stand_ins
    def test_ddp_fsdp2_and_dtensor_compute_on_gpus_what_one_process_does(self):
        script = HERE.parents[2] / ".bench" / "gpu-distributed.py"
        options = ["--device", "cpu", "--transport", "nccl", "--only", "programs"]
        with tempfile.TemporaryDirectory() as folder:
            ended = run_ranks(2, FAKE_CUDA, script, *options, folder, **FAKES)
            self.assertEqual([code for code, *_ in ended], [0, 0], ended)
            for rank in range(2):
                result = json.loads((pathlib.Path(folder) / f"result-{rank}").read_text())
                self.assertEqual(result["programs"]["faults"], [])
                self.assertIn("FSDP2", result["programs"])

    @needs_stand_ins
    def test_a_lost_rank_ends_the_operations_of_the_others_and_changes_no_tensor(self):
        # On the host, regroup.py tests this.
        for codes, nccl in ([0, -9, 0], FAKES["ELASTICDL_NCCL"]), ([0, -9], "off"):
            variables = {**FAKES, "ELASTICDL_NCCL": nccl, "KILL": "1"}
            ended = run_ranks(len(codes), FAKE_CUDA, HERE / "collectives.py", **variables)
            self.assertEqual([code for code, *_ in ended], codes, ended)
            for _, output, _ in ended[::2]:
                self.assertTrue(output.startswith("lost: "), output)

    def test_the_tensors_of_one_operation_are_on_one_device(self):
        def on(*names):
            devices = map(torch.device, names)
            return [types.SimpleNamespace(layout=torch.strided, device=each) for each in devices]

        self.assertIsNone(_devices.gpu_of(on("cpu", "cpu")))
        self.assertEqual(_devices.gpu_of(on("cuda:1", "cuda:1")), torch.device("cuda", 1))
        for names in ("cpu", "cuda:1"), ("cuda:0", "cuda:1"):
            with self.assertRaisesRegex(ValueError, f"several devices: {', '.join(names)}"):
                _devices.gpu_of(on(*names))

    def test_ddp_trains_as_with_gloo(self):
        values = {}
        for backend in "gloo", "elasticdl":
            ended = run_ranks(3, HERE / "ddp.py", backend)
            self.assertEqual({code for code, *_ in ended}, {0}, ended)
            values[backend] = [float(value) for value in ended[0][1].split()]
        worst = max(abs(a - b) for a, b in zip(*values.values(), strict=True))
        self.assertLess(worst, 1e-6)

    def test_a_process_group_is_formed_anew_after_a_loss_and_with_a_newcomer(self):
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, HERE / "regroup.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        members = [
            subprocess.Popen([*command, name, str(store.port)], **pipes) for name in "abcd"
        ]
        try:
            ended = [member.communicate(timeout=240) for member in members]
        finally:
            for member in members:
                member.kill()
        self.assertEqual([member.returncode for member in members], [0, -9, 0, 0], ended)
        self.assertEqual([out for out, _ in ended], ["passed a\n", "", "passed c\n", "passed d\n"])


if __name__ == "__main__":
    unittest.main()
