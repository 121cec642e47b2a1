"""Emulated hosts on one machine: network namespaces on a bridge, links shaped to a rate, one core for each.

Needs root and Debian's iproute2. Everything made here carries this process's number in its name and is taken down
again, also after an error; a namespace that a killed run left behind is harmless, and `sweep` removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "caramel-"
SUBNET = "10.77.0"


class HostsError(RuntimeError):
    """Hosts cannot be emulated here; the text says why and what to do."""


@dataclass(frozen=True)
class Hosts:
    """names: of the namespaces, one a host.  addresses: of the hosts, alike."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def shape(self, mbit: float) -> None:
        """Every host sends at `mbit` Mbit/s from now on, with bursts of no more than 1 ms of that (16 kB at least)."""
        burst = max(16_000, round(mbit * 1e6 / 8 * 1e-3))
        for name in self.names:
            _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf",
                 "rate", f"{mbit}mbit", "burst", str(burst), "latency", "50ms")  # fmt: skip

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` as it is run on a host, on a core of its own."""
        core = sorted(os.sched_getaffinity(0))[host % len(os.sched_getaffinity(0))]
        return ["ip", "netns", "exec", self.names[host], "taskset", "-c", str(core), *command]


def why_not() -> str | None:
    """Why hosts cannot be emulated here; None if they can."""
    missing = [tool for tool in ("ip", "tc", "taskset") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install iproute2 util-linux"
    if os.geteuid():
        return "network namespaces need root"
    return None


@contextlib.contextmanager
def emulated(count: int, mbit: float) -> Iterator[Hosts]:
    """`count` hosts, joined by a switch, each sending at `mbit` Mbit/s. Raises HostsError if that cannot be had."""
    reason = why_not()
    if reason:
        raise HostsError(f"no emulated hosts: {reason}")
    tag = f"{PREFIX}{os.getpid()}"
    switch = f"{tag}-sw"
    names = tuple(f"{tag}-h{i}" for i in range(count))
    hosts = Hosts(names, tuple(f"{SUBNET}.{10 + i}" for i in range(count)))
    try:
        for namespace in (switch, *names):
            _run("ip", "netns", "add", namespace)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for i, (name, address) in enumerate(zip(names, hosts.addresses, strict=True)):
            port = f"p{i}"
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            # Horovod's process sets resolve the host name, whatever the interface they are told.
            folder = Path("/etc/netns", name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        hosts.shape(mbit)
        yield hosts
    finally:
        for namespace in (*names, switch):
            _remove(namespace)


def sweep() -> None:
    """Removes namespaces of runs that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not Path("/proc", name.split("-")[1]).exists():
            _remove(name)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def run_ranks(
    hosts: Hosts, command: Sequence[str], env: Mapping[str, str], logs: Path, limit_seconds: float
) -> list[int | None]:
    """Runs `command` as one Horovod rank on each host and returns exit codes (None: the limit ended it).

    Output goes to logs/rank<r>.log. The launcher itself runs on host 0, which holds the rendezvous.
    """
    logs.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, __file__, str(limit_seconds), str(logs), ",".join(hosts.names), *command]
    inside = ["ip", "netns", "exec", hosts.names[0], *launcher]
    with subprocess.Popen(inside, env=dict(env), start_new_session=True) as process:
        try:
            process.wait(limit_seconds + 30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    codes = (logs / "codes").read_text().split()
    return [int(code) if code != "None" else None for code in codes]


def rank_environment(slot: Any, address: str, port: int, interface: str) -> dict[str, str]:
    """What Horovod's Gloo launcher tells a rank. slot: its place among the ranks.  address, port: of the rendezvous."""
    return {
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
    }


def _launch(limit_seconds: float, logs: Path, names: Sequence[str], command: Sequence[str]) -> None:
    """On host 0: the rendezvous, and a rank on every host."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    hosts = Hosts(tuple(names), tuple(f"{SUBNET}.{10 + i}" for i in range(len(names))))
    slots = get_host_assignments(parse_hosts(",".join(f"{a}:1" for a in hosts.addresses)), len(names))
    server = RendezvousServer(0)
    port = server.start()
    server.init(slots)
    ranks = []
    began = time.monotonic()
    try:
        for slot in slots:
            env = os.environ | rank_environment(slot, hosts.addresses[0], port, "eth0")
            log = (logs / f"rank{slot.rank}.log").open("w")
            ranks.append(subprocess.Popen(hosts.command(slot.rank, command), env=env, stdout=log, stderr=log))
        codes: list[int | None] = []
        for rank in ranks:
            try:
                codes.append(rank.wait(max(1.0, limit_seconds - (time.monotonic() - began))))
            except subprocess.TimeoutExpired:
                codes.append(None)
        (logs / "codes").write_text(" ".join(map(str, codes)))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        server.stop()


if __name__ == "__main__":
    _launch(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:])
