"""`caramel plan`, `simulate` and `report`: what they print and write, and what they say of files they cannot use."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.profiles import chain, wide
from tf_caramel.cli import main
from tf_caramel.planner.network import at
from tf_caramel.planner.plan import Plan, check
from tf_caramel.planner.record import Record
from tf_caramel.planner.simulate import simulate

BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras", "horovod"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def profile_file(tmp_path) -> Path:
    file = tmp_path / "profile.json"
    file.write_text(chain(4).to_json())
    return file


def call(capsys, *arguments) -> tuple[int, str]:
    code = main(list(map(str, arguments)))
    return code, capsys.readouterr().out


def refused(capsys, *arguments) -> str:
    """What argparse says."""
    with pytest.raises(SystemExit) as stopped:
        main(list(map(str, arguments)))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_plan_decides_and_writes_a_plan_that_fits(capsys, tmp_path, profile_file):
    code, said = call(capsys, "plan", profile_file, "-o", tmp_path / "plan.json")
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    check(plan, [{t.name: t.kind for t in chain(4).transfers}])
    assert (code, plan.origin) == (0, "caramel,adaptive")
    step = simulate(chain(4), plan.bodies[0]).step_seconds
    (line,) = [line for line in said.splitlines() if line.startswith("after: caramel,adaptive")]
    assert f" {step * 1e3:.1f} " in line
    for text in ("before: Horovod as it comes", "least slack", "Network", "The plan is in"):
        assert text in said


def test_plan_takes_an_order_and_batches_of_their_own(capsys, tmp_path, profile_file):
    call(capsys, "plan", profile_file, "--order", "fifo", "--batches", "none,window=2", "-o", tmp_path / "plan.json")
    (body,) = Plan.from_json((tmp_path / "plan.json").read_text()).bodies
    assert (len(body.batches), body.window) == (4, 2)


def test_simulate_has_a_row_for_each_set_up(capsys, profile_file):
    code, said = call(capsys, "simulate", profile_file, "--ranks", "2,...,16", "--gbit", "1,10", "--latency-us", "50")
    rows = [line.split()[:2] for line in said.splitlines() if line[:1] == " " and line.split()[0] in ("1", "10")]
    assert code == 0
    assert rows == [[gbit, ranks] for gbit in ("1", "10") for ranks in ("2", "4", "8", "16")]
    for policy in ("horovod", "unfused", "fixed:8MB", "adaptive"):
        assert policy in said


def test_simulate_takes_the_measured_set_up_if_it_is_not_told_another(capsys, tmp_path, profile_file):
    call(capsys, "simulate", profile_file, "--policies", "horovod", "--json", tmp_path / "numbers.json")
    data = json.loads((tmp_path / "numbers.json").read_text())
    expected = simulate(chain(4), None)
    assert data["outcomes"] == [
        {
            "ranks": 2,
            "gbit": None,
            "policy": "horovod",
            "step_seconds": expected.step_seconds,
            "efficiency": expected.efficiency,
            "scaling": chain(4).compute_seconds / expected.step_seconds,
            "exposed_seconds": expected.exposed_seconds,
        }
    ]
    assert (data["collective"], data["latency_seconds"]) == ("ring", None)


def test_a_latency_is_in_microseconds(capsys, tmp_path, profile_file):
    options = ("--ranks", "1024", "--policies", "horovod", "--json", tmp_path / "numbers.json")
    call(capsys, "simulate", profile_file, "--latency-us", "50", *options)
    data = json.loads((tmp_path / "numbers.json").read_text())
    there = at(chain(4).network, 1024, latency_seconds=50e-6)
    assert data["latency_seconds"] == pytest.approx(50e-6)
    assert data["outcomes"][0]["step_seconds"] == pytest.approx(simulate(chain(4), None, network=there).step_seconds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", [8]),
        ("2,4,...,32", [2, 4, 8, 16, 32]),
        ("2,4,…,32", [2, 4, 8, 16, 32]),
        ("3,...,20", [3, 6, 12, 20]),
        ("2,...,4,100", [2, 4, 100]),
    ],
)
def test_dots_stand_for_doubles(capsys, tmp_path, profile_file, text, expected):
    options = ("--policies", "horovod", "--ranks", text, "--json", tmp_path / "numbers.json")
    assert call(capsys, "simulate", profile_file, *options)[0] == 0
    assert [o["ranks"] for o in json.loads((tmp_path / "numbers.json").read_text())["outcomes"]] == expected


@pytest.mark.parametrize("text", ["...", "2,...", "...,4", "", "2,x", "0", "-1", "2.5"])
def test_lists_that_are_none_are_refused(capsys, profile_file, text):
    assert "--ranks" in refused(capsys, "simulate", profile_file, f"--ranks={text}")


@pytest.mark.parametrize("text", ["0", "nan", "inf", "fast"])
def test_a_speed_is_a_number_above_0(capsys, profile_file, text):
    assert f"'{text}' is not a number above 0" in refused(capsys, "simulate", profile_file, f"--gbit={text}")


def test_report_prints_and_writes_a_page_and_a_trace(capsys, tmp_path, profile_file):
    (tmp_path / "plan.json").write_text(Plan((_decided(capsys, profile_file),), "caramel,adaptive").to_json())
    (tmp_path / "record.json").write_text(Record("made up", "train_step", why=("Just so.",)).to_json())
    code, said = call(capsys, "report", tmp_path)
    assert code == 0
    assert "train_step" in said
    assert "- Just so." in said
    assert "train_step" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_report_writes_where_it_is_told(capsys, tmp_path, profile_file):
    page, trace = tmp_path / "a.html", tmp_path / "b.json"
    assert call(capsys, "report", tmp_path, "--html", page, "--chrome", trace)[0] == 0
    assert page.is_file()
    assert trace.is_file()
    assert not (tmp_path / "report.html").exists()


def _decided(capsys, profile_file):
    file = profile_file.with_name("decided.json")
    call(capsys, "plan", profile_file, "-o", file)
    return Plan.from_json(file.read_text()).bodies[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "missing.json"), "missing.json: No such file or directory"),
        (("plan", "profile.json", "--order", "best"), "'best' is not an order: fifo, tic, tac, caramel"),
        (("plan", "profile.json", "-o", "no/such/plan.json"), "no/such/plan.json: No such file or directory"),
        (("plan", "cut.json"), "cut.json: cut off or not JSON"),
        (("plan", "bytes.json"), "bytes.json: cut off or not JSON"),
        (("simulate", "profile.json", "--policies", "horovod,best"), "'best' is not an order"),
        (("simulate", "alone.json", "--ranks", "2"), "measured on one rank"),
        (("report", "empty"), "empty: neither it nor a folder in it has"),
        (("report", "missing"), "missing: no such folder"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, monkeypatch, tmp_path, profile_file, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("cut.json").write_text(profile_file.read_text()[:100])
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")
    Path("alone.json").write_text(profile_file.read_text().replace('"ranks":2', '"ranks":1'))
    Path("empty").mkdir()
    code, output = call(capsys, *arguments)
    assert code == 1
    assert said in output.splitlines()[-1]
    assert output.count("\n") == 1 or arguments[-2] == "-o"


def test_simulate_works_where_neither_tensorflow_nor_horovod_is(tmp_path, profile_file):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    caramel = Path(sys.executable).with_name("caramel")
    done = subprocess.run(
        [caramel, "simulate", profile_file, "--gbit", "10"],
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "horovod" in done.stdout


def test_what_ifs_of_a_very_large_step_cost_few_simulations(capsys, tmp_path):
    # 30 rows of 4 policies: 5 s where one simulation takes 9 ms. Against that, and in CPU time: machines may be busy.
    profile = wide(1000, 5000)
    file = tmp_path / "profile.json"
    file.write_text(profile.to_json())
    one = min(_seconds(lambda: simulate(profile, None, detail=False)) for _ in range(20))
    command = ("simulate", file, "--ranks", "2,4,...,1024", "--gbit", "1,10,100", "--latency-us", "50")
    assert _seconds(lambda: call(capsys, *command)) < 1500 * one


def _seconds(what) -> float:
    begun = time.process_time()
    what()
    return time.process_time() - begun


def test_plan_and_simulate_defer_what_is_deferrable(capsys, tmp_path):
    made = chain(20, bytes_=3_000_000)
    profile = replace(made, transfers=tuple(replace(t, deferrable=True) for t in made.transfers))
    (tmp_path / "profile.json").write_text(profile.to_json())
    code, said = call(capsys, "plan", tmp_path / "profile.json", "--defer", "-o", tmp_path / "plan.json")
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert (code, plan.origin) == (0, "caramel,adaptive,defer")
    assert plan.bodies[0].deferred
    assert "of extra memory" in said
    policies = "caramel+adaptive,caramel+adaptive+defer"
    code, said = call(
        capsys, "simulate", tmp_path / "profile.json", "--policies", policies, "--json", tmp_path / "out.json"
    )
    without, deferring = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert deferring["step_seconds"] < without["step_seconds"]
    assert deferring["deferred_bytes"] > 0
    assert "deferrable" not in said


@pytest.mark.parametrize("words", [("plan", "--defer"), ("simulate", "--policies", "caramel+adaptive+defer")])
def test_if_nothing_is_known_to_be_deferrable_it_is_said(capsys, profile_file, words):
    command, *options = words
    code, said = call(capsys, command, profile_file, *options)
    assert code == 0
    assert "no transfer of this profile is known to be deferrable" in said
    assert "deferrable" not in call(capsys, command, profile_file)[1]
