"""The ground that ranks stand on: emulated hosts on one machine, or, where those cannot be had, plain loopback.

An emulated host is a network namespace on a switch, its link shaped to a rate, with one core, or half of one through a
quota. Needs root and Debian's iproute2. Everything made here carries this process's number in its name and is taken
down again, also after an error; what a killed run left behind is harmless, and `sweep` removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "caramel-"
SUBNET = "10.77.0"
LARGEST_GSO = 65_536  # bytes that TCP hands to a device at once, at most
PERIOD_US = 10_000  # of a quota: short, or a rank would stand still while the others wait for its messages


class HostsError(RuntimeError):
    """Hosts cannot be emulated here; the text says why and what to do."""


def _core(host: int) -> str:
    cores = sorted(os.sched_getaffinity(0))
    return str(cores[host % len(cores)])


class QuotaError(HostsError):
    """More hosts than cores cannot be had here."""


@dataclass(frozen=True)
class Hosts:
    """names: of the namespaces, one a host.  addresses: of the hosts, alike.  share: of a core that each host has."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    share: float = 1.0

    interface = "eth0"
    emulated = True

    def shape(self, mbit: float) -> None:
        """Every host sends at `mbit` Mbit/s from now on, with bursts of no more than 1 ms of that (16 kB at least).

        TCP hands over no more than a burst at a time, headers included. Else the qdisc cuts what is larger into frames
        and lets them go one by one, each of which wakes the receiver: a network card hands on several at once.
        What is queued when the speed changes is lost and sent again: tbf would wait for ever to send a packet larger
        than its new burst.
        """
        burst = max(16_000, round(mbit * 1e6 / 8 * 1e-3))
        for name in self.names:
            _run("ip", "-n", name, "link", "set", "eth0", "gso_max_size", str(min(LARGEST_GSO, round(0.95 * burst))))
            qdisc = ("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root")
            _run(*qdisc, "pfifo")
            _run(*qdisc, "tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "50ms")

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` as it is run on a host, on a core of its own."""
        return ["ip", "netns", "exec", self.names[host], "taskset", "-c", _core(host), *command]

    def confine(self, host: int, pid: int) -> None:
        """A process just started on a host gets no more than its share of the core."""
        if self.share < 1:
            (_quotas()[0] / self.names[host] / "cgroup.procs").write_text(str(pid))

    def __str__(self) -> str:
        cores = "one core" if self.share == 1 else f"{self.share:g} of a core"
        return f"{len(self.names)} emulated hosts of {cores} each"


@dataclass(frozen=True)
class Loopback:
    """Ranks on this machine's loopback interface, each on a core, nothing shaped: only the mechanics are the same."""

    addresses: tuple[str, ...]

    interface = "lo"
    emulated = False
    share = 1.0

    @classmethod
    def of(cls, count: int) -> Loopback:
        return cls(tuple(f"127.0.0.{1 + i}" for i in range(count)))

    def shape(self, mbit: float) -> None:
        """Loopback is as fast as it is."""

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        pin = ["taskset", "-c", _core(host)] if shutil.which("taskset") else []
        return [*pin, *command]

    def confine(self, host: int, pid: int) -> None:
        """Loopback has no quotas."""

    def __str__(self) -> str:
        return (
            f"{len(self.addresses)} ranks on loopback, not shaped (no emulated hosts: {why_not() or 'not asked for'})"
        )


Ground = Hosts | Loopback


def _quotas() -> tuple[Path, bool]:
    """Where this machine's CPU quotas are made, and whether that is cgroup v2. Raises QuotaError if nowhere."""
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    if (old / "cpu.cfs_quota_us").exists():
        return old, False
    if (new / "cgroup.subtree_control").exists() and "cpu" in (new / "cgroup.subtree_control").read_text().split():
        return new, True
    raise QuotaError("no CPU quotas here: neither cgroup v1 (cpu) nor v2 with the cpu controller is there")


def _make_quota(name: str, share: float) -> None:
    base, v2 = _quotas()
    quota = round(share * PERIOD_US)
    try:
        (base / name).mkdir()
        if v2:
            (base / name / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (base / name / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (base / name / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError as error:
        raise QuotaError(f"no CPU quotas here: {error}") from error


def _remove_quota(name: str) -> None:
    with contextlib.suppress(OSError, HostsError):
        (_quotas()[0] / name).rmdir()


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
    """`count` hosts, joined by a switch, each sending at `mbit` Mbit/s, sharing this machine's cores evenly, one each
    at most. Raises HostsError if that cannot be had.
    """
    reason = why_not()
    if reason:
        raise HostsError(f"no emulated hosts: {reason}")
    tag = f"{PREFIX}{os.getpid()}"
    switch = f"{tag}-sw"
    names = tuple(f"{tag}-h{i}" for i in range(count))
    share = min(1.0, len(os.sched_getaffinity(0)) / count)
    hosts = Hosts(names, tuple(f"{SUBNET}.{10 + i}" for i in range(count)), share)
    try:
        for name in names if share < 1 else ():
            _make_quota(name, share)
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
            _remove_quota(namespace)


@contextlib.contextmanager
def ground(count: int, mbit: float) -> Iterator[Ground]:
    """Emulated hosts where they can be had, else loopback, which says so."""
    if why_not():
        yield Loopback.of(count)
        return
    with emulated(count, mbit) as hosts:
        yield hosts


def sweep() -> None:
    """Removes namespaces of runs that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not Path("/proc", name.split("-")[1]).exists():
            _remove(name)
    with contextlib.suppress(HostsError):
        for quota in _quotas()[0].glob(f"{PREFIX}*"):
            if not Path("/proc", quota.name.split("-")[1]).exists():
                _remove_quota(quota.name)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


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
