"""Two machines on one: network namespaces with addresses of their own and a cable between them, where permitted."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Where a program runs: `prefix` goes before its command, `address` is how the other one reaches it."""

    name: str
    address: str
    prefix: tuple[str, ...] = ()
    interface: str = "lo"


HERE = Machine("a", "127.0.0.1")
LOOPBACK = (HERE, Machine("b", "127.0.0.2"))
"""Without the permission: two addresses of one machine, whose link cannot be cut."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Give two namespaces that a veth pair joins, and remove them; without the right to, two loopback addresses.

    The names hold this process's id, so that tests beside each other do not meet.
    """
    names = [f"hrl{side}{os.getpid()}" for side in "ab"]
    third = os.getpid() % 250
    machines = [
        Machine(side, f"10.213.{third}.{number}", ("ip", "netns", "exec", name), name)
        for number, (side, name) in enumerate(zip("ab", names, strict=True), start=1)
    ]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            names[1],
            "netns",
            names[1],
        )
        for machine in machines:
            _ip(
                "-n",
                machine.interface,
                "addr",
                "add",
                f"{machine.address}/30",
                "dev",
                machine.interface,
            )
            _ip("-n", machine.interface, "link", "set", machine.interface, "up")
            _ip("-n", machine.interface, "link", "set", "lo", "up")
        found = (machines[0], machines[1])
    except (OSError, subprocess.SubprocessError):
        found = LOOPBACK
    try:
        yield found
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "del", name], check=False, capture_output=True, timeout=10
            )
