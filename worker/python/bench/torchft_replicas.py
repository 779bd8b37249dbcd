"""Runs replicas of a program of torchft, and a new one in place of each that is killed.

Arguments: number of replicas, number of those that start at once, program, its arguments. Each
SIGUSR1 starts one more.
"""

import ctypes
import pathlib
import signal
import socket
import subprocess
import sys
import time

count, first, program, arguments = *map(int, sys.argv[1:3]), sys.argv[3], sys.argv[4:]


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
    *("--min_replicas", str(max(first - 1, 1)), "--bind", f"127.0.0.1:{port}"),
    *("--join_timeout_ms", "10000", "--quorum_tick_ms", "50", "--heartbeat_timeout_ms", "1000"),
)
time.sleep(1)


def replica(index):
    address = f"http://127.0.0.1:{port}"
    numbers = map(str, (index, count, first))
    return start(sys.executable, program, *arguments, *numbers, address)


replicas = [replica(index) for index in range(first)]
signal.signal(signal.SIGUSR1, lambda *_: replicas.append(replica(len(replicas))))
# The first one that ends has counted everything; the others end with this process.
while not any(each.poll() == 0 for each in replicas):
    time.sleep(0.02)
    for index, each in enumerate(replicas):
        if each.poll() not in (None, 0):
            replicas[index] = replica(index)
time.sleep(1)
lighthouse.kill()
