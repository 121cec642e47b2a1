"""`caramel doctor`: versions, what Horovod was built with, interfaces, and what will not work, in one screen."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import struct
import subprocess
import sys
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table

from tf_caramel import __version__, config

# Runs in a process of its own: a TensorFlow or Horovod that does not import must not take the doctor down.
_PROBE = """
import json
facts = {}
def look(name, what):
    try:
        facts[name] = what()
    except BaseException as error:
        facts[name + " error"] = (str(error).strip().splitlines() or [type(error).__name__])[-1]
def tensorflow():
    import tensorflow as tf
    from importlib import metadata
    keras = getattr(tf.keras, "__version__", None) or metadata.version("keras")  # 2.15's facade has no version
    return {"version": tf.__version__, "tf.keras": keras}
def horovod():
    import horovod.tensorflow as hvd
    return {"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built())}
def self_test():
    from tf_caramel.runtime import tf_private
    return tf_private.self_test()
def priority():
    from tf_caramel.runtime import priority
    return priority.obstacle()
look("tensorflow", tensorflow)
look("horovod", horovod)
look("self-test", self_test)
look("priority", priority)
print("FACTS " + json.dumps(facts))
"""
_LIMIT_SECONDS = 120


def diagnose(console: Console) -> bool:
    """Prints the screen; True if training can work here."""
    facts = _probe()
    interfaces = _interfaces()
    table = Table(show_header=False, box=None)
    table.add_row("tf_caramel", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    table.add_row("packages", ", ".join(f"{n} {v}" for n in _PACKAGES if (v := _version(n))))
    if "tensorflow" in facts:
        table.add_row("tf.keras is", f"Keras {facts['tensorflow']['tf.keras']}")
    built = facts.get("horovod")
    table.add_row("Horovod has", ", ".join(k for k, v in built.items() if v) if built else "not usable")
    table.add_row("interfaces", ", ".join(f"{name} {address}" for name, address in interfaces))
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("TF_CARAMEL", "HOROVOD_"))}
    table.add_row("settings", ", ".join(f"{k}={v}" for k, v in settings.items()) or "none")
    console.print(table, soft_wrap=True)
    fatal, notes = _findings(facts, interfaces)
    for text in fatal:
        console.print(f"will not work: {text}", style="red", soft_wrap=True)
    for text in notes:
        console.print(f"note: {text}", soft_wrap=True)
    console.print("Training can work here." if not fatal else "Training cannot work here yet.")
    return not fatal


_PACKAGES = ("tensorflow", "keras", "tf_keras", "horovod", "numpy", "protobuf")


def _findings(facts: dict[str, Any], interfaces: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    fatal, notes = [], []
    if "tensorflow" not in facts:
        fatal.append(f"TensorFlow does not import ({facts.get('tensorflow error')}): pip install tensorflow")
    elif _version("horovod") is None:
        fatal.append("Horovod is not installed: run  caramel build-horovod")
    elif "horovod" not in facts:
        fatal.append(
            f"Horovod does not import ({facts.get('horovod error')}); it may have been built for another TensorFlow: "
            "run  caramel build-horovod --force"
        )
    elif not facts["horovod"]["gloo"] and not facts["horovod"]["mpi"]:
        fatal.append("Horovod was built with neither Gloo nor MPI: run  caramel build-horovod --force")
    try:
        config.load()
    except config.ConfigError as error:
        fatal.append(str(error))
    if facts.get("self-test") or "self-test error" in facts:
        text = facts.get("self-test") or facts["self-test error"]
        notes.append(f"functions are left as traced, for the self-test fails: {text}")
    if facts.get("priority"):
        notes.append(facts["priority"])
    if facts.get("horovod") and not facts["horovod"]["mpi"]:
        notes.append("no MPI: start with horovodrun, not with mpirun or srun")
    if all(address.startswith("127.") for _, address in interfaces):
        notes.append("no network interface but loopback: ranks on this machine only")
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        notes.append(f"the host name {socket.gethostname()} does not resolve: process sets fail; add it to /etc/hosts")
    if facts.get("tensorflow", {}).get("tf.keras", "").startswith("3"):
        notes.append("on Keras 3 hvd.DistributedOptimizer exchanges nothing: use tf_caramel.DistributedOptimizer")
    notes.append("jit_compile=True does not work with Horovod: pass jit_compile=False to compile()")
    return fatal, notes


def _probe() -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TF_CARAMEL")} | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-W", "ignore", "-c", _PROBE]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"tensorflow error": f"importing it took more than {_LIMIT_SECONDS} s"}
    found = re.search(r"^FACTS (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        return {"tensorflow error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    facts: dict[str, Any] = json.loads(found[1])
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _interfaces() -> list[tuple[str, str]]:
    """(name, IPv4 address) of every interface; psutil comes with Horovod."""
    try:
        import psutil
    except ImportError:
        return [(name, address) for _, name in socket.if_nameindex() if (address := _address(name))]
    return [
        (name, entry.address)
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def _address(interface: str) -> str | None:
    """Without psutil, on Linux: what the kernel says (SIOCGIFADDR). None if the interface has no IPv4 address."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, 0x8915, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
