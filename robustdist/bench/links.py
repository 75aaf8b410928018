"""Ranks in network namespaces of their own, joined by rate-limited links: a slow network on one machine."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["LINKS", "Link", "Links", "open_links", "sent_by", "transfer_rate"]

Link: TypeAlias = Literal["100mbit", "1gbit", "none"]
LINKS: tuple[Link, ...] = ("100mbit", "1gbit", "none")

#: Bytes that may leave at once after a pause, per rate; the queue holds 20 ms.
_BURSTS = {"100mbit": "64kb", "1gbit": "256kb"}
_TOOLS = ("unshare", "nsenter", "mount", "ip", "tc")
_INTERFACE = "e0"
_PORT = 29700
_CALIBRATION_SECONDS = 2.0
_SETTLING_SECONDS = 0.5
_PATIENCE = 60.0


@dataclass(frozen=True)
class Links:
    """Where ranks run.

    Attributes:
        limit: The rate, "none" for the loopback device.
        note: Why that is not the rate asked for, or None.
        holder: Process whose namespaces the ranks enter, and the options that enter them; None without any.
    """

    limit: Link
    note: str | None = None
    holder: tuple[int, tuple[str, ...]] | None = None

    def command(self, rank: int) -> list[str]:
        """Return what to put before the command of a rank."""
        if self.holder is None:
            return []
        pid, options = self.holder
        ip = shutil.which("ip", path=_search_path()) or "ip"
        return ["nsenter", "--target", str(pid), *options, "--mount", "--net", ip, "netns", "exec", f"rd{rank}"]

    def environment(self) -> dict[str, str]:
        """Return the variables by which the ranks find each other."""
        if self.holder is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        return {"MASTER_ADDR": _address(0), "MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": _INTERFACE}


@contextmanager
def open_links(world_size: int, link: Link) -> Iterator[Links]:
    """Join ``world_size`` network namespaces in a star whose arms let ``link`` through in each direction.

    They hang on a process that ends when this one closes its input or dies, so nothing stays behind in any case.
    Without root rights the namespaces are made inside a user namespace. Where that is not allowed either, or the tools
    are missing, the ranks get the loopback device without a limit, and ``note`` says why.
    """
    if link == "none":
        yield Links("none")
        return
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_search_path()) is None]
    if missing:
        yield Links("none", f"no limit on the link: install {', '.join(missing)} (packages iproute2 and util-linux)")
        return
    reasons = []
    for options in ((), ("--user",)):
        with _held(world_size, link, options) as (pid, message):
            if message == "ready":
                entering = (*options, "--preserve-credentials") if options else ()
                yield Links(link, holder=(pid, entering))
                return
            reasons.append(message)
    told = "; ".join(dict.fromkeys(reasons))
    yield Links("none", f"no limit on the link: this system allows no network namespaces ({told})")


def sent_by() -> int | None:
    """Return the bytes that this rank's interface has sent; None on the loopback device, which all share."""
    if os.environ.get("GLOO_SOCKET_IFNAME") != _INTERFACE:
        return None
    return int(Path(f"/sys/class/net/{_INTERFACE}/statistics/tx_bytes").read_text())


def transfer_rate(rank: int) -> float | None:
    """Return bits per second of a plain TCP transfer from rank 1 to rank 0, on rank 0; None on the others.

    The first half second does not count. Ranks 0 and 1 have to call it at the same time.
    """
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
    if rank == 1:
        with _connected(address) as connection:
            _send(connection)
    if rank != 0:
        return None
    with socket.create_server(address) as server:
        connection, _ = server.accept()
        with connection:
            return _receive(connection)


def _send(connection: socket.socket) -> None:
    block = bytes(2**16)
    end = time.monotonic() + _CALIBRATION_SECONDS
    while time.monotonic() < end:
        connection.sendall(block)


def _receive(connection: socket.socket) -> float:
    block = bytearray(2**16)
    begin = time.monotonic()
    counted, total, now = begin, 0, begin
    while size := connection.recv_into(block):
        now = time.monotonic()
        if now - begin < _SETTLING_SECONDS:
            counted = now
        else:
            total += size
    return 8 * total / max(now - counted, 1e-9)


def _connected(address: tuple[str, int]) -> socket.socket:
    """Connect once the other side listens."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(address)
        time.sleep(0.05)
    return socket.create_connection(address)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _search_path() -> str:
    """The search path with the folders for administrators, which other users may not have in theirs."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


@contextmanager
def _held(world_size: int, link: Link, options: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Keep the process that owns the namespaces; yield its number and the last line it printed, "ready" if it is."""
    mapping = ("--user", "--map-root-user") if options else ()
    # it waits for its input, which ends with this process at the latest
    script = "; ".join(
        ["set -e", *_script(world_size, link), "echo ready", "exec >&-", "exec 2>&-", "read -r _ || true"]
    )
    process = subprocess.Popen(
        ["unshare", *mapping, "--net", "--mount", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": _search_path()},
    )
    with process:
        lines = process.stdout.read().splitlines() if process.stdout is not None else []
        yield process.pid, (lines or ["no message"])[-1]


def _script(world_size: int, link: Link) -> list[str]:
    """Return shell commands that make a bridge, and per rank a namespace, a cable and a limit on both of its ends."""
    shaping = f"root tbf rate {link} burst {_BURSTS[link]} latency 20ms"
    # ip keeps the names of namespaces below /run, where only root may write
    commands = ["mount -t tmpfs tmpfs /run", "ip netns add rdsw"]
    commands += ["ip -n rdsw link add br0 type bridge", "ip -n rdsw link set br0 up"]
    for rank in range(world_size):
        inside, port = f"rd{rank}", f"p{rank}"
        commands += [
            f"ip netns add {inside}",
            f"ip -n {inside} link set lo up",
            f"ip link add {_INTERFACE} netns {inside} type veth peer name {port} netns rdsw",
            f"ip -n {inside} addr add {_address(rank)}/24 dev {_INTERFACE}",
            f"ip -n rdsw link set {port} master br0",
            f"ip -n rdsw link set {port} up",
            f"ip -n {inside} link set {_INTERFACE} up",
            f"ip netns exec {inside} tc qdisc add dev {_INTERFACE} {shaping}",
            f"ip netns exec rdsw tc qdisc add dev {port} {shaping}",
        ]
    return [shlex.join(command.split()) for command in commands]
