"""Two nodes on one machine: network namespaces with addresses of their own and a link between.

Needs Linux, root and iproute2. Whatever runs there speaks to nothing but the other namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .torchrun import kill

DEVICE = "cce"
CLONE_NEWUTS = 0x04000000
# Ranks of one host would look into each other's memory.
AS_HOST = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')


@dataclass(frozen=True)
class Node:
    """A namespace; its end of the link is the device `cce`."""

    namespace: str
    address: str

    def run(self, *command: str) -> str:
        """Runs a command in the node, which must succeed; returns its output."""
        return _run("ip", "netns", "exec", self.namespace, *command)

    def start(self, *command: str, log: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
        """Starts a command in the node, on a host of another name, with `environment` added to this
        process's; its output goes to `log`."""
        sockets = {"GLOO_SOCKET_IFNAME": DEVICE, "TP_SOCKET_IFNAME": DEVICE}
        with log.open("w") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *AS_HOST, self.namespace, *command],
                env={**os.environ, **sockets, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def enter(self) -> None:
        """Moves the calling process into the node for good; it also has another host's name."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.namespace).open() as file:
            if libc.setns(file.fileno(), 0) or libc.unshare(CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
        socket.sethostname(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE

    def sent_bytes(self, pid: int) -> int:
        """Returns the bytes sent through this end of the link so far, headers included; `pid` is
        any process there."""
        table = Path(f"/proc/{pid}/net/dev").read_text()
        (counters,) = re.findall(rf"^ *{DEVICE}: *(.+)$", table, re.MULTILINE)
        # Eight of what was received stand before those of what was sent.
        return int(counters.split()[8])

    def cap(self, bits_per_s: int) -> None:
        """Bounds the bytes that this end sends, by a token bucket of 4 kB."""
        shape = ("tbf", "rate", f"{bits_per_s}bit", "burst", "4kb", "latency", "1s")
        self.run("tc", "qdisc", "replace", "dev", DEVICE, "root", *shape)

    def cut(self) -> None:
        """Cuts the link: nothing arrives any more, and nobody is told."""
        self.run("ip", "link", "set", DEVICE, "down")

    def give_up_after(self, retries: int) -> None:
        """Sets the retries of TCP's packets, each sent twice as long after the packet before;
        Linux's own is 15."""
        self.run("sh", "-c", f"echo {retries} > /proc/sys/net/ipv4/tcp_retries2")

    def pids(self) -> list[int]:
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    def kill_all(self) -> None:
        """Kills every process of the node, as if it had lost power."""
        for pid in self.pids():
            kill(pid)


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Namespaces with names of their own, joined by a link; gone afterwards, with all processes.

    Raises:
        OSError: this machine does not allow them; the text says why.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise OSError("network namespaces need `ip` and `tc` (package iproute2)")
    name = f"cce-{uuid.uuid4().hex[:8]}"
    nodes = (Node(f"{name}-0", "10.77.0.1"), Node(f"{name}-1", "10.77.0.2"))
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.namespace)
        first, second = nodes
        pair = ("type", "veth", "peer", "name", DEVICE, "netns", second.namespace)
        _run("ip", "-n", first.namespace, "link", "add", "name", DEVICE, *pair)
        for node in nodes:
            of_node = ("ip", "-n", node.namespace)
            _run(*of_node, "addr", "add", f"{node.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _run(*of_node, "link", "set", device, "up")
        yield nodes
    finally:
        for node in nodes:
            if Path("/run/netns", node.namespace).exists():
                node.kill_all()
                with contextlib.suppress(OSError):
                    _run("ip", "netns", "del", node.namespace)


def free_port() -> int:
    """Returns a port of this host that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
