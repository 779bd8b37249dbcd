#!/usr/bin/env python3
"""delayed-links.py NAMESPACE-PREFIX HOSTS RATE DELAY_MS: slow links between hosts 0 to HOSTS - 1.

Each host is a network namespace, PREFIX-HOST, with the address 10.77.HOST.2, as tests/src/network.rs
makes them. Packets between them then go through this process, which holds each back for the delay;
a host sends at the rate, as `tc` reads it: 1gbit. For kernels without netem. Prints a line when the
links are there, and ends with its standard input.
"""

import collections
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 1, 0x1000
MTU = 32768


def ip(words):
    subprocess.run(["ip", *words.split()], check=True)


def make(prefix, host, rate):
    """The packets that a host sends to others, and receives."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"edl{os.getpid() % 10000}-{host}"
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    namespace = f"{prefix}-{host}"
    ip(f"link set {name} netns {namespace}")
    ip(f"-n {namespace} link set {name} mtu {MTU} up")
    ip(f"-n {namespace} route add 10.77.0.0/16 dev {name} src 10.77.{host}.2")
    queue = f"root tbf rate {rate} burst 256kb latency 100ms"
    words = ["-n", namespace, "qdisc", "add", "dev", name, *queue.split()]
    subprocess.run(["tc", *words], check=True)
    return file


def main(prefix, hosts, rate, delay_ms):
    delay = float(delay_ms) / 1000
    links = [make(prefix, host, rate) for host in range(int(hosts))]
    waiting = collections.deque()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for link in links:
        selector.register(link, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        rest = waiting[0][0] - time.monotonic() if waiting else None
        # A wait ends up to a millisecond late; the last part is not slept through.
        ready = selector.select(rest and (0 if rest < 0.0015 else rest - 0.0015))
        for key, _ in ready:
            if key.fileobj is sys.stdin:
                return
            try:
                while True:
                    packet = os.read(key.fd, MTU)
                    if packet[0] >> 4 == 4 and packet[18] < len(links):
                        waiting.append((time.monotonic() + delay, links[packet[18]], packet))
            except BlockingIOError:
                pass
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, link, packet = waiting.popleft()
            try:
                os.write(link, packet)
            except OSError:
                # A full queue drops packets, as a switch does; so does a host that is gone.
                pass


if __name__ == "__main__":
    main(*sys.argv[1:])
