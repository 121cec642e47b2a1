"""Builds Horovod against the TensorFlow that is installed, and proves the result with an all-reduce of two ranks.

Horovod 0.28.1 has no wheels. From TensorFlow 2.16 on its build fails on one file, whose only use is XLA: a header that
it includes is no longer in TensorFlow's wheel. That file is left out there; everything else compiles and works.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

VERSION = "0.28.1"
XLA_SOURCE = "xla_mpi_ops.cc"
PROOF_LIMIT_SECONDS = 120
_TOOLS = ["setuptools<70", "wheel", "packaging"]  # what Horovod's setup.py needs; put beside, not into, the environment
_FACTS = """
import json, tensorflow as tf
flags = tf.sysconfig.get_compile_flags() + tf.sysconfig.get_link_flags()
flags = [f for f in flags if f[:2] not in ("-I", "-L")]  # where TensorFlow lies changes nothing in the result
print("FACTS " + json.dumps({"version": tf.__version__, "git": str(tf.version.GIT_VERSION), "flags": flags}))
"""
_PROOF = """
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
total = hvd.allreduce(tf.range(4.0) * (hvd.rank() + 1), op=hvd.Sum).numpy().tolist()
assert hvd.size() == 2 and total == [0.0, 3.0, 6.0, 9.0], total
assert hvd.gloo_built(), "built without Gloo"
print("PROVED mpi=%d nccl=%d" % (bool(hvd.mpi_built()), bool(hvd.nccl_built())))
"""


class BuildError(Exception):
    """The build cannot start or failed; the text says why and what to do."""


@dataclass(frozen=True)
class Options:
    mpi: bool = False
    nccl: bool = False
    force: bool = False
    jobs: int = os.cpu_count() or 1
    log: Path | None = None


def build(options: Options, console: Console) -> None:
    """Makes Horovod work in this Python; nothing is done that was done before. Raises BuildError."""
    if not options.force and _installed_version() == VERSION:
        console.print(f"Horovod {VERSION} is installed; testing it with two ranks ...")
        problem = prove(options)
        if problem is None:
            console.print("It works. Nothing to do (--force builds it anew).")
            return
        console.print(f"It does not do: {problem}")
    facts = _tensorflow_facts()
    problems = missing(options, facts)
    if problems:
        raise BuildError("Missing:\n" + "\n".join(f"  - {p}" for p in problems))
    assert facts is not None
    folder = cache_folder(options, facts)
    folder.mkdir(parents=True, exist_ok=True)
    wheels = [] if options.force else sorted(folder.glob("*.whl"))
    log = Log(options.log or folder / ("install.log" if wheels else "build.log"), console)
    if wheels:
        console.print(f"Using the wheel built before: {wheels[0]}")
        wheel = wheels[0]
    else:
        console.print(f"Building Horovod {VERSION} for TensorFlow {facts['version']}; the log is {log.path}")
        wheel = _build_wheel(options, facts, folder, log)
    log.run("installing", [*_pip("install"), "--force-reinstall", "--no-deps", str(wheel)])
    log.run("installing what it needs", [*_pip("install"), str(wheel)])
    console.print("Testing it with two ranks ...")
    problem = prove(options)
    if problem is not None:
        again = "\nThe wheel was built before; --force builds it anew." if wheels else ""
        raise BuildError(f"Horovod was built and installed, but does not work: {problem}{again}")
    console.print("Done: two ranks agree on a sum.")


def missing(options: Options, facts: Mapping[str, Any] | None) -> list[str]:
    """What the build needs and this machine lacks, each with how to get it."""
    problems = []
    if facts is None:
        problems.append(f"TensorFlow cannot be imported by {sys.executable}: pip install tensorflow")
    version = _cmake_version()
    if version is None:
        problems.append("cmake: pip install 'cmake<4'")
    elif not (3, 13) <= version < (4, 0):
        text = ".".join(map(str, version))
        problems.append(f"cmake from 3.13 to below 4 (this is {text}, {_cmake()}): pip install 'cmake<4'")
    if not any(shutil.which(c) for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c):
        problems.append("a C++ compiler: apt-get install g++ (or your system's way)")
    if not shutil.which("make"):
        problems.append("make: apt-get install make")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        problems.append("Python's headers: apt-get install python3-dev")
    if options.mpi and not shutil.which("mpicxx"):
        problems.append("mpicxx, for --with-mpi: apt-get install libopenmpi-dev openmpi-bin")
    if options.nccl:
        named = [os.environ.get(name) for name in ("HOROVOD_NCCL_HOME", "HOROVOD_CUDA_HOME")]
        places = [Path(home, "include") for home in (*named, "/usr/local/cuda", "/usr") if home]
        places += map(Path, filter(None, [os.environ.get("HOROVOD_NCCL_INCLUDE")]))
        if not any((place / "nccl.h").exists() for place in places):
            problems.append("nccl.h, for --with-nccl: apt-get install libnccl-dev, or set HOROVOD_NCCL_HOME")
    return problems


def cache_folder(options: Options, facts: Mapping[str, Any]) -> Path:
    """Where a wheel for exactly this Python, TensorFlow and choice of options is kept."""
    # Not platform.platform(): it names the kernel, and an update of that needs no new wheel.
    system = [sys.implementation.cache_tag, sysconfig.get_platform(), platform.libc_ver()]
    key = [VERSION, facts, system, options.mpi, options.nccl, _lacks_xla_header(facts["version"])]
    short = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tf_caramel" / "horovod" / f"tf{facts['version']}-{sys.implementation.cache_tag}-{short}"


def _lacks_xla_header(tensorflow_version: str) -> bool:
    return tuple(map(int, tensorflow_version.split(".")[:2])) >= (2, 16)


def leave_out_xla(source: Path, tensorflow_version: str) -> bool:
    """Takes the XLA file out of the build where its header is missing. True if it did; BuildError if it cannot."""
    if not _lacks_xla_header(tensorflow_version):
        return False
    lists = source / "horovod" / "tensorflow" / "CMakeLists.txt"
    lines = lists.read_text().splitlines(keepends=True)
    kept = [line for line in lines if XLA_SOURCE not in line]
    if len(kept) == len(lines):
        raise BuildError(f"{lists} does not name {XLA_SOURCE}: this is not the Horovod {VERSION} that we know")
    lists.write_text("".join(kept))
    return True


def prove(options: Options) -> str | None:
    """An all-reduce of two local ranks. None if it worked, else what went wrong in one line."""
    horovodrun = Path(sys.executable).with_name("horovodrun")
    if not horovodrun.exists():
        return f"there is no {horovodrun}"
    command = [str(horovodrun), "-np", "2", "--gloo", sys.executable, "-c", _PROOF]
    own = ("HOROVOD_", "TF_CARAMEL")
    env = {k: v for k, v in os.environ.items() if not k.startswith(own)} | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    process = _start(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=PROOF_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"two ranks did not finish within {PROOF_LIMIT_SECONDS} s"
    finally:
        _end(process)  # horovodrun ends its ranks
    proved = re.findall(r"PROVED mpi=(\d) nccl=(\d)", output)
    if process.returncode or len(proved) != 2:
        lines = [line for line in output.splitlines() if "Error" in line] or output.splitlines()[-1:]
        return lines[0] if lines else f"horovodrun ended with {process.returncode}"
    lacking = [n for n, asked, has in zip(("MPI", "NCCL"), (options.mpi, options.nccl), proved[0], strict=True)
               if asked and has != "1"]  # fmt: skip
    return f"it was built without {' and '.join(lacking)}" if lacking else None


class Log:
    """Runs commands into a file; shows that time passes; on failure shows the file's last lines."""

    def __init__(self, path: Path, console: Console) -> None:
        self.path, self.console = path, console
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def run(self, what: str, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Any = None) -> None:
        """Raises BuildError with the log's last lines if the command fails. Ctrl-C ends the command too."""
        began = last = time.monotonic()
        with self.path.open("a") as output, self.console.status(what) as status:
            output.write(f"\n$ {' '.join(command)}\n")
            output.flush()
            try:
                process = _start(command, env=env, cwd=cwd, stdout=output)
            except OSError as error:
                raise BuildError(f"{what}: {error}") from error
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    now = time.monotonic()
                    status.update(f"{what}: {now - began:.0f} s")
                    if not self.console.is_terminal and now - last > 15:
                        self.console.print(f"{what}: {now - began:.0f} s")
                        last = now
            finally:
                _end(process)
        if process.returncode:
            tail = "\n".join(self.path.read_text(errors="replace").splitlines()[-30:])
            raise BuildError(f"{what} failed (exit code {process.returncode}). The end of {self.path}:\n{tail}")


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """In a session of its own, so that `_end` reaches the compilers that pip started, however caramel is stopped."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True, **options
    )


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends what still runs; the hard way if it does not listen."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue


def _build_wheel(options: Options, facts: Mapping[str, Any], folder: Path, log: Log) -> Path:
    with tempfile.TemporaryDirectory(prefix="caramel-horovod-") as name:
        work = Path(name)
        tools = work / "tools"
        log.run("fetching build tools", [*_pip("install"), "--target", str(tools), *_TOOLS])
        path = os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")]))  # TensorFlow may be on it
        env = {**os.environ, **_build_environment(options), "PYTHONPATH": path}
        no_isolation = ["--no-deps", "--no-build-isolation"]
        fetch = [*_pip("download"), *no_isolation, "--no-binary", ":all:", "-d", str(work), f"horovod=={VERSION}"]
        log.run("fetching Horovod's sources", fetch, env)
        shutil.unpack_archive(next(work.glob("horovod-*.tar.gz")), work)
        source = work / f"horovod-{VERSION}"
        if leave_out_xla(source, facts["version"]):
            log.console.print(f"Leaving out {XLA_SOURCE}: TensorFlow {facts['version']} lacks a header that it needs")
        made = work / "wheel"
        log.run("building Horovod", [*_pip("wheel"), *no_isolation, "-w", str(made), str(source)], env)
        wheel = next(made.glob("horovod-*.whl"))
        # Copied under another name first: an interruption leaves no half wheel behind.
        partial = folder / (wheel.name + ".partial")
        shutil.copyfile(wheel, partial)
        return partial.replace(folder / wheel.name)


def _build_environment(options: Options) -> dict[str, str]:
    env = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CMAKE": _cmake() or "cmake",
        "MAKEFLAGS": f"-j{options.jobs}",
        ("HOROVOD_WITH_MPI" if options.mpi else "HOROVOD_WITHOUT_MPI"): "1",
    }
    return env | ({"HOROVOD_GPU_OPERATIONS": "NCCL"} if options.nccl else {})


def _pip(command: str) -> list[str]:
    return [sys.executable, "-m", "pip", command, "--disable-pip-version-check"]


def _cmake() -> str | None:
    """The cmake beside this Python (where pip puts it) or on PATH."""
    return shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def _cmake_version() -> tuple[int, ...] | None:
    cmake = _cmake()
    if cmake is None:
        return None
    output = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version\s+(\d+)\.(\d+)", output)
    return (int(found[1]), int(found[2])) if found else None


def _installed_version() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return None


def _tensorflow_facts() -> dict[str, Any] | None:
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", _FACTS], env=env, capture_output=True, text=True, check=False)
    found = re.search(r"^FACTS (.*)$", done.stdout, re.MULTILINE)
    facts: dict[str, Any] | None = json.loads(found[1]) if found else None
    return facts
