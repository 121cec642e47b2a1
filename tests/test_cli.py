"""The `caramel` command and the import without Horovod: what they say where something is missing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tf_caramel import __version__, build_horovod, doctor
from tf_caramel.build_horovod import BuildError, Log, Options, cache_folder, leave_out_xla, missing

FACTS = {"version": "2.21.0", "git": "v2.21.0", "flags": []}
CARAMEL = Path(sys.executable).with_name("caramel")
BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError("No module named 'horovod'", name="horovod")
sys.meta_path.insert(0, Block())
import importlib.metadata, importlib.util
spec, version = importlib.util.find_spec, importlib.metadata.version
importlib.util.find_spec = lambda name, package=None: None if name == "horovod" else spec(name, package)
def own_version(name):
    if name == "horovod":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = own_version
"""


def call(*command, limit=120, **env):
    env = {k: v for k, v in os.environ.items() if not k.startswith("TF_CARAMEL")} | {"COLUMNS": "200"} | env
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=limit, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def without_horovod(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    return {"PYTHONPATH": str(tmp_path)}


def test_version():
    assert call(CARAMEL, "--version") == (0, f"caramel {__version__}\n")


def test_the_command_line_imports_neither_tensorflow_nor_horovod():
    code = "import sys, tf_caramel.cli; print([m for m in ('tensorflow', 'horovod') if m in sys.modules])"
    assert call(sys.executable, "-c", code) == (0, "[]\n")


def test_a_build_says_all_that_is_missing_before_it_starts(tmp_path):
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": ""}
    script = "import sys; sys.path.insert(0, ''); from tf_caramel import build_horovod as b; b._cmake = lambda: None\n"
    script += (
        "from tf_caramel.cli import main; sys.exit(main(['build-horovod', '--force', '--with-mpi', '--with-nccl']))"
    )
    code, output = call(sys.executable, "-c", script, **env)
    assert code == 1
    for text in ("pip install 'cmake<4'", "g++", "make", "--with-mpi", "--with-nccl"):
        assert text in output
    assert not (tmp_path / "cache" / "tf_caramel").exists()  # others may keep something


def test_without_tensorflow_a_build_says_so():
    assert any("pip install tensorflow" in problem for problem in missing(Options(), None))


def test_cmake_4_is_refused(tmp_path, monkeypatch):
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho cmake version 4.1.2\n")
    cmake.chmod(0o755)
    monkeypatch.setattr(build_horovod, "_cmake", lambda: str(cmake))
    assert any("this is 4.1" in problem for problem in missing(Options(), FACTS))


def test_what_works_is_not_built_again():
    code, output = call(CARAMEL, "build-horovod", limit=200)
    assert code == 0
    assert "It works. Nothing to do" in output


@pytest.mark.parametrize(("version", "left_out"), [("2.15.1", False), ("2.16.0", True), ("3.0.0", True)])
def test_the_xla_file_is_left_out_from_2_16_on(tmp_path, version, left_out):
    lists = tmp_path / "horovod" / "tensorflow" / "CMakeLists.txt"
    lists.parent.mkdir(parents=True)
    lists.write_text("list(APPEND S mpi_ops.cc)\nlist(APPEND S xla_mpi_ops.cc)\nend()\n")
    assert leave_out_xla(tmp_path, version) is left_out
    assert ("xla_mpi_ops" in lists.read_text()) is not left_out
    assert "S mpi_ops.cc" in lists.read_text()
    if left_out:
        with pytest.raises(BuildError, match=r"CMakeLists.txt does not name xla_mpi_ops.cc"):
            leave_out_xla(tmp_path, version)


def test_wheels_are_kept_apart_by_tensorflow_and_options(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = [
        cache_folder(Options(), FACTS),
        cache_folder(Options(mpi=True), FACTS),
        cache_folder(Options(), {**FACTS, "git": "v2.21.1"}),
        cache_folder(Options(), {**FACTS, "flags": ["-D_GLIBCXX_USE_CXX11_ABI=0"]}),
    ]
    assert len(set(folders)) == 4
    assert cache_folder(Options(jobs=7, force=True), FACTS) == folders[0]
    assert all(folder.is_relative_to(tmp_path) for folder in folders)


def test_a_step_that_fails_shows_the_end_of_its_log(tmp_path):
    log = Log(tmp_path / "build.log", Console())
    script = "for i in range(99): print('line', i)\nraise SystemExit(3)"
    with pytest.raises(BuildError, match="building failed") as error:
        log.run("building", [sys.executable, "-c", script])
    assert str(tmp_path / "build.log") in str(error.value)
    assert "exit code 3" in str(error.value)
    assert "line 98" in str(error.value)
    assert "line 5\n" not in str(error.value)
    assert "line 5\n" in (tmp_path / "build.log").read_text()


def test_stopping_a_step_stops_what_it_started(tmp_path):
    # A shell with a child of its own, like pip with its compilers; the signal goes to caramel alone.
    script = "import sys; from pathlib import Path; from rich.console import Console\n"
    script += "from tf_caramel.build_horovod import Log\n"
    script += "Log(Path(sys.argv[1]), Console()).run('building', ['sh', '-c', 'sleep 60 & echo started $!; wait'])"
    log = tmp_path / "build.log"
    with subprocess.Popen([sys.executable, "-c", script, str(log)], stderr=subprocess.DEVNULL) as caramel:
        limit = time.monotonic() + 60
        while not (log.exists() and (found := re.search(r"^started (\d+)$", log.read_text(), re.MULTILINE))):
            assert time.monotonic() < limit
            time.sleep(0.1)
        caramel.send_signal(signal.SIGINT)
        assert caramel.wait(30) != 0
    started = int(found[1])  # ended; whether PID 1 has collected it yet is not ours
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BuildError, match="no-such-program"):
        Log(tmp_path / "build.log", Console()).run("building", ["/no-such-program"])


def test_doctor_shows_versions_on_one_screen():
    code, output = call(CARAMEL, "doctor", TF_CARAMEL="1")
    assert code == 0
    for text in (
        __version__,
        "tensorflow 2.",
        "horovod 0.28.1",
        "gloo",
        "127.0.0.1",
        "TF_CARAMEL=1",
        "Training can work",
    ):
        assert text in output
    assert len(output.splitlines()) <= 24


def test_doctor_names_a_bad_variable():
    code, output = call(CARAMEL, "doctor", TF_CARAMEL_TIMEUOT="3")
    assert code == 1
    assert "did you mean TF_CARAMEL_TIMEOUT?" in output


def test_doctor_shows_brackets_as_they_are():
    code, output = call(CARAMEL, "doctor", TF_CARAMEL="[/on]", HOROVOD_LOG_LEVEL="[/b]")
    assert code == 1
    assert "TF_CARAMEL='[/on]': use 1" in output
    assert "HOROVOD_LOG_LEVEL=[/b]" in output


def test_doctor_finds_addresses_without_psutil(monkeypatch):
    with_psutil = doctor._interfaces()
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert ("lo", "127.0.0.1") in doctor._interfaces()
    assert set(doctor._interfaces()) <= set(with_psutil)


def test_doctor_without_horovod_says_which_command_to_run(without_horovod):
    code, output = call(CARAMEL, "doctor", **without_horovod)
    assert code == 1
    assert "Horovod is not installed: run  caramel build-horovod" in output


def test_importing_without_horovod_says_which_command_to_run(without_horovod):
    code, output = call(sys.executable, "-c", "import tf_caramel", **without_horovod)
    assert code == 0
    assert "caramel build-horovod" in output
    code, output = call(sys.executable, "-c", "from tf_caramel import DistributedOptimizer", **without_horovod)
    assert code == 1
    assert "ImportError" in output
    assert "caramel build-horovod" in output
