"""The benchmark's mechanics, with real ranks: nothing here looks at how fast anything is."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys

import psutil
import pytest

from examples.benchmarks import arms, hosts
from examples.benchmarks.parties import Party, PartyError
from tests.horovod.conftest import KERAS_3
from tests.ranks import ROOT
from tf_caramel.planner.profile import Profile

pytestmark = pytest.mark.skipif(not KERAS_3, reason="the benchmark is written for Keras 3")
LIMIT_SECONDS = 240
emulates = hosts.why_not() is None


def left_over():
    """Emulated hosts and ranks that are there now."""
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout if emulates else ""
    names = {line.split()[0] for line in listed.splitlines() if line.startswith(hosts.PREFIX)}
    commands = {p.pid: " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])}
    return names | {pid for pid, command in commands.items() if "benchmarks.programs." in command}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    before, out = left_over(), tmp_path_factory.mktemp("smoke")
    command = [sys.executable, "-m", "examples.benchmarks", "--smoke", "--out", str(out)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TF_CARAMEL", "HOROVOD_"))}
    done = subprocess.run(
        command,
        env=env | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out, left_over() - before


def test_results_have_all_rows_with_finite_numbers(smoke):
    (cell,) = json.loads((smoke[0] / "results.json").read_text())["cells"].values()
    expected = [arms.LOCAL, arms.NETWORK, arms.AS_IT_COMES, arms.UNFUSED, *arms.PRODUCT]
    if any(why.startswith("deferred: ") for why in cell["why"]):  # whether deferring pays is up to this machine
        expected = [arm for arm in expected if arm not in (arms.DEFERRED, arms.LOOSE)]
    for arm in expected:
        turns = cell["arms"][arm.name]["turns"]
        assert turns
        for turn in turns:
            numbers = [*turn["seconds"], turn["cpu_seconds"], turn["sent_bytes"], turn["peak_bytes"]]
            assert all(math.isfinite(n) and n > 0 for n in numbers)
    assert cell["arms"][arms.UNFUSED.name]["messages"] == 10  # one for each of the model's tensors
    assert cell["arms"][arms.AS_IT_COMES.name]["messages"] < 10  # so the fusion threshold is back after a turn without
    for arm in (arms.AS_IT_COMES, arms.UNFUSED, arms.MEASURED):
        assert cell["arms"][arm.name]["turns"][0]["sent_bytes"] >= cell["gradient_bytes"]


def test_the_profile_of_a_cell_is_kept_for_the_simulator(smoke):
    (file,) = (smoke[0] / "profiles").iterdir()
    assert Profile.from_json(file.read_text()).transfers


def test_tables_and_picture_are_written(smoke):
    text = (smoke[0] / "results.md").read_text()
    for part in ("## To reach", "**tf_caramel**", "Horovod, no fusion", "Simulated"):
        assert part in text
    assert (smoke[0] / "results.png").read_bytes().startswith(b"\x89PNG")


SENDS = "import socket, sys; s = socket.create_connection((sys.argv[1], 7000))\nwhile True: s.sendall(bytes(1 << 20))"
RECEIVES = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
peer, total = server.accept()[0], 0
while True:
    total += len(peer.recv(1 << 20))
    while total > 1 << 20:
        total -= 1 << 20
        print("MB", flush=True)
"""


@pytest.mark.skipif(not emulates, reason="emulated hosts need root and iproute2")
def test_a_link_that_becomes_slower_under_way_goes_on():
    def megabytes(process, count):
        for _ in range(count):
            assert select.select([process.stdout], [], [], 30)[0], "the link stands still"
            assert process.stdout.readline() == b"MB\n"

    with hosts.emulated(2, 1000) as ground, contextlib.ExitStack() as started:

        def start(host, program):
            command = ground.command(host, [sys.executable, "-c", program, ground.addresses[1]])
            process = started.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0))
            started.callback(process.kill)
            return process

        receives = start(1, RECEIVES)
        assert receives.stdout.readline() == b"ready\n"
        start(0, SENDS)
        for mbit in (500, 100, 1000, 50):
            megabytes(receives, 20)
            ground.shape(mbit)
        megabytes(receives, 20)


def test_nothing_is_left_over(smoke):
    assert smoke[1] == set()


def test_failing_rank_is_named_with_its_log_and_all_are_ended(tmp_path):
    before = left_over()
    ground = hosts.Loopback.of(2)
    party = Party("horovod", "plain", ground, {"model": "nonesuch", "batch": 1, "accelerator": None}, tmp_path)
    try:
        with pytest.raises(PartyError, match=r"horovod, rank \d: KeyError: 'nonesuch'"):
            party.ask("first", limit_seconds=120)
    finally:
        party.close()
    assert left_over() - before == set()
