"""Two hosts on one: network namespaces with a wire between them (Linux, as root)."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWUTS = 0x04000000
DEVICE = "wire"


@dataclass(frozen=True)
class Node:
    """A network namespace: its name, and this end's address."""

    name: str
    address: str

    def enter(self) -> None:
        """The calling process, for good; it also has another host's name."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.name).open() as file:
            if libc.setns(file.fileno(), 0) or libc.unshare(CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        socket.sethostname(self.name)
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE

    def cut(self) -> None:
        """Takes this end of the wire down."""
        _ip("-n", self.name, "link", "set", DEVICE, "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", DEVICE, "up")


@contextmanager
def two_nodes(number: int) -> Iterator[tuple[Node, Node]]:
    """Args: number: below 250, of this pair among those of this process.

    Raises:
        OSError: this machine does not allow it.
    """
    prefix = f"cce{os.getpid()}n{number}"
    nodes = Node(f"{prefix}a", "10.77.0.1"), Node(f"{prefix}b", "10.77.0.2")
    try:
        for node in nodes:
            _ip("netns", "add", node.name)
        _ip(
            *("link", "add", DEVICE, "netns", nodes[0].name, "type", "veth"),
            *("peer", "name", DEVICE, "netns", nodes[1].name),
        )
        for node in nodes:
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", DEVICE)
            _ip("-n", node.name, "link", "set", "lo", "up")
            node.mend()
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
