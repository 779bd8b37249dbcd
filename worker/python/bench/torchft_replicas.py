"""Runs replicas of a program of torchft, and a new one in place of each that is killed.

Arguments: number of replicas, program, its arguments.
"""

import ctypes
import pathlib
import signal
import socket
import subprocess
import sys
import time

count, program, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]


def end_with_parent():
    """As a job's master ends its workers."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def start(*command):
    return subprocess.Popen(command, preexec_fn=end_with_parent)


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
lighthouse = start(
    *(sys.executable, str(pathlib.Path(__file__).with_name("torchft_lighthouse.py"))),
    # While a replica restarts, the others continue.
    *("--min_replicas", str(max(count - 1, 1)), "--bind", f"127.0.0.1:{port}"),
    *("--join_timeout_ms", "10000", "--quorum_tick_ms", "50", "--heartbeat_timeout_ms", "1000"),
)
time.sleep(1)


def replica(index):
    address = f"http://127.0.0.1:{port}"
    return start(sys.executable, program, *arguments, str(index), str(count), address)


replicas = [replica(index) for index in range(count)]
# The first one that ends has counted everything; the others end with this process.
while not any(each.poll() == 0 for each in replicas):
    time.sleep(0.02)
    for index, each in enumerate(replicas):
        if each.poll() not in (None, 0):
            replicas[index] = replica(index)
time.sleep(1)
lighthouse.kill()
