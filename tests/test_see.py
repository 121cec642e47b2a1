"""What a person sees: the report of a folder, its tables, the page, the Chrome trace."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.profiles import chain, layered, resnet_like, wide
from tf_caramel.planner.decide import loosened
from tf_caramel.planner.plan import BodyPlan, Piece, Plan
from tf_caramel.planner.profile import InputError, Network, Profile
from tf_caramel.planner.record import Observed, Record
from tf_caramel.planner.simulate import Span, simulate
from tf_caramel.see import report
from tf_caramel.see.chrome_trace import to_json
from tf_caramel.see.page import html
from tf_caramel.see.reports import Entry, Report, Step
from tf_caramel.see.tables import least_slack, network, summary, text, what_ifs
from tf_caramel.see.timeline import blocks, lanes, phases, ready_times, without

FREE = Network(1e-3, 1e-8)  # 1 ms and 10 ms a MB, without any work for the cores
SEEN = (Observed("batch0", 4096, 0.01, 0.03), Observed("batch1", 4096, 0.02, 0.04), Observed("batch2", 1, 0.03, 0.05))


def plan_of(profile: Profile, size: int) -> Plan:
    """Messages of `size` gradients in the order in which the step makes them."""
    names = [Piece(t.name) for t in profile.transfers]
    return Plan((BodyPlan(tuple(tuple(names[k : k + size]) for k in range(0, len(names), size))),), "fifo,by count")


def entry_of(profile: Profile, size: int = 2, record: Record | None = None) -> Entry:
    return Entry("train_step", Step.of(profile, plan_of(profile, size)), record, record.why if record else ())


def leave(folder: Path, profile: Profile | None = None, size: int = 2, **record) -> Path:
    """What a training run leaves."""
    folder.mkdir(parents=True)
    if profile:
        (folder / "profile.json").write_text(profile.to_json())
        (folder / "plan.json").write_text(plan_of(profile, size).to_json())
    if record:
        (folder / "record.json").write_text(Record(**{"key": "made up", "function": folder.name} | record).to_json())
    return folder


# The report of a folder


def test_a_report_says_what_the_simulator_and_the_clock_say(tmp_path):
    profile = chain(4)
    arms = {"traced": (0.2, 0.3, 0.25), "measured": (0.15,)}
    said = str(report(leave(tmp_path / "train_step", profile, arms=arms, chosen="measured", why=("Because.",))))
    before, after = simulate(profile, None), simulate(profile, plan_of(profile, 2).bodies[0])
    assert "train_step" in said
    for label, outcome, measured in (("before", before, "250.0"), ("after: fifo,by count", after, "150.0")):
        (line,) = [line for line in said.splitlines() if line.startswith(label)]
        numbers = [f"{outcome.step_seconds * 1e3:.1f}", measured, f"{outcome.exposed_seconds * 1e3:.2f}"]
        assert line.split()[-4:] == [*numbers, f"{outcome.efficiency:.2f}"]
        assert f" {len(outcome.messages)}  4.0 MB " in line
    assert "- Because." in said


def test_a_folder_of_folders_is_reported_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        leave(tmp_path / name, chain(2))
    (tmp_path / "empty").mkdir()
    assert [entry.name for entry in report(tmp_path).entries] == ["a", "b", "c"]


def test_a_run_that_ended_early_is_reported_with_the_reason(tmp_path):
    found = report(leave(tmp_path / "train_step", function="train_step", why=("Tracing was interrupted.",)))
    said = str(found)
    assert "Tracing was interrupted." in said
    assert "There is no profile.json and no plan.json" in said
    assert "Tracing was interrupted." in html(found.entries)


def test_a_profile_without_a_plan_is_not_enough(tmp_path):
    folder = leave(tmp_path / "train_step", chain(2))
    (folder / "plan.json").unlink()
    assert "There is no plan.json: the run ended before that." in str(report(folder))


def test_a_report_needs_something_to_report(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="neither it nor a folder in it has a profile"):
        report(tmp_path)
    with pytest.raises(InputError, match="nothing: no such folder"):
        report(tmp_path / "nothing")


def test_a_record_of_another_profile_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"record.json: key: 'other', but the profile's is 'made up'"):
        report(leave(tmp_path / "f", chain(2), key="other"))


def test_a_plan_of_another_profile_is_refused(tmp_path):
    folder = leave(tmp_path / "f", chain(2))
    (folder / "plan.json").write_text(plan_of(chain(3), 1).to_json())
    with pytest.raises(InputError, match=r"plan.json: bodies\[0\].*'layer2/kernel' is not a gradient of this step"):
        report(folder)


# Tables


def test_the_arm_that_runs_is_marked_and_the_static_plan_is_there_if_it_was_measured():
    record = Record("made up", "f", chosen="static", arms={"static": (0.1,)})
    grid = summary(Step.of(chain(2), plan_of(chain(2), 1)), record)
    assert [row[0] for row in grid.rows if "this one runs" in row[0]] == [
        "static plan, made without times  (this one runs)"
    ]
    assert [row[4] for row in grid.rows] == ["-", "100.0", "-"]


def test_a_static_plan_in_the_folder_is_what_was_measured_as_static():
    arms = {"traced": (0.3,), "static": (0.1,), "measured": (0.2,)}
    record = Record("made up", "f", chosen="static", arms=arms)
    grid = summary(Step.of(chain(2), Plan(plan_of(chain(2), 1).bodies, "static")), record)
    assert [(row[0], row[4]) for row in grid.rows] == [
        ("before: Horovod as it comes", "300.0"),
        ("plan from the profile", "200.0"),
        ("after: static  (this one runs)", "100.0"),
    ]


def test_the_ten_transfers_with_the_least_slack_are_listed_the_most_urgent_first():
    # Each travels 11 ms beside an op of 20 ms, 21 ms, ...; the update that waits for it comes after that op.
    profile = layered([(0.020 + 0.001 * k, 1_000_000, 0) for k in range(12)], network=FREE)
    grid = least_slack(Step.of(profile, plan_of(profile, 1)))
    assert [(row[0], row[-1]) for row in grid.rows] == [(f"layer{k}/kernel", f"{9 + k:.2f}") for k in range(10)]


def test_gradients_of_one_message_have_start_boundaries_of_their_own():
    # Forward 3 x 10 ms, loss 0.1 ms; then the kernel's gradient, and 10 ms for the activations', layer by layer.
    profile = chain(3, network=FREE)
    step = Step.of(profile, plan_of(profile, 3))
    assert ready_times(profile, step.after) == pytest.approx(
        {"layer2/kernel": 0.0401, "layer1/kernel": 0.0601, "layer0/kernel": 0.0801}
    )
    (message,) = step.after.messages
    assert {row[0]: row[1:2] + row[3:6] for row in least_slack(step).rows}["layer2/kernel"] == (
        "layer2/kernel_gradient",
        "40.10",
        f"{message.start * 1e3:.2f}",
        f"{message.end * 1e3:.1f}",
    )


def test_a_fit_is_shown_with_its_residuals():
    grid = network(Network(1e-3, 1e-8, samples=((100_000, 2.2e-3), (1_000_000, 11e-3))))
    assert grid.rows == (("100.0 kB", "2.20", "2.00", "+10.0%"), ("1.0 MB", "11.00", "11.00", "+0.0%"))
    assert "1.00 ms and 10 ns a byte (0.8 Gbit/s)" in grid.note


def test_a_network_without_samples_says_so():
    assert "There are no samples" in network(FREE).note


def test_tables_keep_to_their_width():
    assert max(map(len, text([entry_of(resnet_like())], width=90).splitlines())) <= 90


def test_what_ifs_are_split_into_tables_that_fit():
    from tf_caramel.planner.what_if import what_if

    policies = ["horovod", "unfused", "fifo+none"]
    rows = what_if(chain(2), [2, 4], [None, 10.0], policies)
    assert [grid.columns[2::4] for grid in what_ifs(chain(2), rows, policies, 50)] == [
        ("horovod\nstep ms",),
        ("unfused\nstep ms",),
        ("fifo+\nnone\nstep ms",),
    ]
    (grid,) = what_ifs(chain(2), rows, policies, 200)
    assert [row[:2] for row in grid.rows] == [("measured", "2"), ("measured", "4"), ("10", "2"), ("10", "4")]
    assert float(grid.rows[0][2]) == pytest.approx(simulate(chain(2), None).step_seconds * 1e3, abs=0.006)


# What is drawn


def test_phases_of_a_chain():
    found = phases(chain(2))
    assert [n for n in found if found[n] == "forward"] == ["batch", "layer0/forward", "layer1/forward", "loss"]
    assert {n for n in found if found[n] == "update"} == {
        f"layer{k}/kernel/{what}" for k in (0, 1) for what in ("HorovodAllreduce", "update")
    }
    assert {n for n in found if found[n] == "backward"} == {
        f"layer{k}/{what}" for k in (0, 1) for what in ("gradient", "kernel_gradient")
    }


def test_phases_of_ops_that_are_not_called_gradients_come_from_the_graph():
    by_name = phases(chain(2))
    renamed = Profile.from_json(chain(2).to_json().replace("gradient", "slope"))
    expected = {name.replace("gradient", "slope"): phase for name, phase in by_name.items()}
    assert phases(renamed) == expected | {"layer0/slope": "update"}  # nothing waits for it


def test_what_no_transfer_waits_for_is_not_forward():
    plain = json.loads(chain(1).to_json())
    plain["ops"].append({"name": "sgd/momentum", "seconds": 0.0, "inputs": ["batch"], "start": 0.0})
    assert phases(Profile.from_json(json.dumps(plain)))["sgd/momentum"] == "update"


def test_what_comes_before_the_first_gradient_is_backward_if_it_is_called_a_gradient():
    # The gradient of the loss, which all others wait for.
    plain = json.loads(chain(1).to_json())
    (loss,) = [op for op in plain["ops"] if op["name"] == "loss"]
    plain["ops"].append(loss | {"name": "gradient_tape/loss", "inputs": ["loss"]})
    (kernel,) = [op for op in plain["ops"] if op["name"] == "layer0/kernel_gradient"]
    kernel["inputs"] = ["gradient_tape/loss"]
    found = phases(Profile.from_json(json.dumps(plain)))
    assert (found["loss"], found["gradient_tape/loss"]) == ("forward", "backward")


def test_thin_ops_are_merged_and_none_is_lost():
    profile = wide()
    outcome = simulate(profile, None, spans=True)
    found = blocks(outcome.spans, phases(profile), limit=500)
    assert len(found) <= 500
    assert sum(b.count for b in found) == len(outcome.spans)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert (found[0].start, max(b.end for b in found)) == (outcome.spans[0].start, max(s.end for s in outcome.spans))


def test_ops_that_can_be_told_apart_are_not_merged():
    spans = [Span(f"op{k}", 0, 0.1 * k, 0.1 * k + 0.1) for k in range(3)]
    assert [b.name for b in blocks(spans, dict.fromkeys(("op0", "op1", "op2"), "forward"))] == ["op0", "op1", "op2"]


def test_a_merged_block_is_of_one_phase_and_has_the_name_of_its_longest_op():
    spans = [
        Span("short", 0, 0.0, 1e-6),
        Span("long", 0, 1e-6, 4e-6),
        Span("update", 0, 4e-6, 5e-6),
        Span("end", 0, 1, 2),
    ]
    phase_of = {"short": "forward", "long": "forward", "update": "update", "end": "update"}
    assert [(b.name, b.count) for b in blocks(spans, phase_of)] == [("long", 2), ("update", 1), ("end", 1)]


_INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: tuple(sorted(pair))), max_size=8
)


@given(_INTERVALS, _INTERVALS)
def test_instants_without_others(intervals, taken):
    found = without(intervals, taken)

    def inside(which):
        return {k for k in range(30) if any(start <= k and k + 1 <= end for start, end in which)}

    assert inside(found) == inside(intervals) - inside(taken)
    assert all(start < end for start, end in found)
    assert all(a[1] < b[0] or a[1] in {t for pair in taken for t in pair} for a, b in pairwise(found))


def test_exposed_communication_is_what_the_simulator_calls_so():
    outcome = simulate(resnet_like(), None, spans=True)
    bare = without([(m.start, m.end) for m in outcome.messages], [(s.start, s.end) for s in outcome.spans])
    assert outcome.exposed_seconds > 0.1
    assert sum(end - start for start, end in bare) == pytest.approx(outcome.exposed_seconds)


def test_overlapping_intervals_get_lanes_of_their_own():
    assert lanes([(0, 2), (1, 3), (2, 4), (3, 5), (3, 4)]) == [0, 1, 0, 1, 2]


# The page


class Reader(HTMLParser):
    """Elements that are open, the attributes seen, and the text of scripts that hold data."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.data, self.words = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == ("script", {"type": "application/json"}):
            self.data.append(json.loads(data))
        elif self.open and self.open[-1][0] not in ("script", "style"):
            self.words.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def test_the_page_asks_for_nothing_from_outside():
    page = html([entry_of(resnet_like())])
    seen = read(page).seen
    assert not {"src", "href", "srcset", "action"} & {name for _, attributes in seen for name in attributes}
    assert not {"link", "iframe", "img", "object"} & {tag for tag, _ in seen}
    assert not re.search(r"https?:|//cdn|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", page)
    assert ("meta", "default-src 'none'") in {(tag, a.get("content", "").split(";")[0]) for tag, a in seen}


def test_the_page_draws_what_was_simulated():
    entry = entry_of(chain(4, bytes_=5_000_000), record=Record("made up", "f", observed=SEEN))
    (data,) = read(html([entry])).data
    before, after, observed = data["tracks"]
    for track, outcome in ((before, entry.step.before), (after, entry.step.after)):
        assert track["step"] == round(outcome.step_seconds * 1e6)
        assert [[data["names"][k] for k in m["members"]] for m in track["messages"]] == [
            list(m.pieces) for m in outcome.messages
        ]
        for drawn, m in zip(track["messages"], outcome.messages, strict=True):
            found = [drawn[k] for k in ("bytes", "ready", "start", "end", "needed", "slack")]
            assert found == [m.bytes_, *(round(t * 1e6) for t in (m.ready, m.start, m.end, m.needed, m.slack))]
        assert sum(b[1] for b in track["blocks"]) == len(outcome.spans)
    made = {data["names"][gradient]: data["names"][op] for gradient, op in data["made"]}
    assert made == {f"layer{k}/kernel": f"layer{k}/kernel_gradient" for k in range(4)}
    assert [m["lane"] for m in observed["messages"]] == [0, 1, 0]
    assert data["end"] == max(before["step"], after["step"])


def test_all_messages_are_in_the_page_as_text_too():
    entry = entry_of(chain(4))
    words = read(html([entry])).words
    for message in (*entry.step.before.messages, *entry.step.after.messages):
        assert ", ".join(message.pieces) in words


def test_chunks_are_named_with_their_part():
    profile = chain(1)
    plan = Plan((BodyPlan(((Piece("layer0/kernel", 0, 2),), (Piece("layer0/kernel", 1, 2),))),))
    (data,) = read(html([Entry("f", Step.of(profile, plan))])).data
    assert [m["part"] for m in data["tracks"][1]["messages"]] == [["[0/2]"], ["[1/2]"]]
    assert [m["members"] for m in data["tracks"][1]["messages"]] == [data["tracks"][0]["messages"][0]["members"]] * 2


def test_a_name_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script>&<b>\"'"
    profile = layered([(0.01, 1000, 0)])
    text_ = profile.to_json().replace("layer0/kernel", json.dumps(evil)[1:-1])
    profile = Profile.from_json(text_)
    record = Record("made up", evil, why=(evil,), observed=(Observed(evil, 1, 0.0, 1.0),))
    page = html([Entry(evil, Step.of(profile, Plan(plan_of(profile, 1).bodies, evil)), record, record.why)])
    reader = read(page)
    assert "alert(1)</script>" not in page
    assert [tag for tag, _ in reader.seen if tag in ("script", "b")] == ["script", "script"]
    assert evil in reader.words
    assert evil in reader.data[0]["names"]


def test_the_page_of_a_very_large_step_stays_below_2_mb():
    assert len(html([entry_of(wide(), size=1)]).encode()) < 2_000_000


def test_the_canvas_has_a_text_alternative_and_can_be_reached_by_keys():
    (canvas,) = [a for tag, a in read(html([entry_of(chain(2))])).seen if tag == "canvas" and "aria-hidden" not in a]
    assert canvas["tabindex"] == "0"
    assert "tables" in canvas["aria-label"]


# The Chrome trace


def trace_of(*entries: Entry) -> list[dict]:
    from tf_caramel.see.chrome_trace import to_json

    return json.loads(to_json(entries))["traceEvents"]


def test_a_trace_keeps_to_the_rules_of_its_format():
    events = trace_of(entry_of(resnet_like(), record=Record("made up", "f", observed=SEEN)))
    assert {e["ph"] for e in events} == {"X", "M"}
    last: dict[tuple[int, int], float] = {}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in (e for e in events if e["ph"] == "X"):
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid"} <= set(event)
        thread = (event["pid"], event["tid"])
        assert thread in named
        assert event["dur"] >= 0
        assert event["ts"] >= last.get(thread, 0) - 1e-9  # begins when the one before has ended
        last[thread] = event["ts"] + event["dur"]
    for first, second in pairwise(e for e in events if e["ph"] == "X"):
        assert (first["pid"], first["ts"]) <= (second["pid"], second["ts"])


def test_a_trace_has_a_process_for_before_after_and_observed():
    events = trace_of(entry_of(chain(3), record=Record("made up", "f", observed=SEEN)))
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["before: Horovod as it comes", "after: fifo,by count", "observed: a traced step, static plan"]
    threads = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert threads == [(1, "compute"), (1, "network"), (2, "compute"), (2, "network"), (3, "network"), (3, "network 2")]


def test_a_message_in_a_trace_says_what_is_in_it():
    entry = entry_of(chain(3))
    messages = [e for e in trace_of(entry) if e.get("cat") == "message" and e["pid"] == 2]
    (first, *_) = entry.step.after.messages
    assert messages[0]["name"] == "layer2/kernel and 1 more"
    assert messages[0]["args"]["members"] == ["layer2/kernel", "layer1/kernel"]
    assert messages[0]["args"]["made by"] == ["layer2/kernel_gradient", "layer1/kernel_gradient"]
    assert messages[0]["args"]["bytes"] == 2_000_000
    assert messages[0]["ts"] == pytest.approx(first.start * 1e6, abs=1e-3)
    assert messages[0]["args"]["slack (ms)"] == pytest.approx(first.slack * 1e3, abs=1e-6)


def test_traces_of_two_functions_do_not_share_processes():
    events = trace_of(entry_of(chain(2)), entry_of(chain(3)))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names) == [1, 2, 3, 4]
    assert names[3] == "train_step: before: Horovod as it comes"


def test_a_report_writes_its_page_and_its_trace(tmp_path):
    found = Report((entry_of(chain(2)),))
    found.html(tmp_path / "page.html")
    found.chrome(tmp_path / "trace.json")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


# Deferral


def deferring(profile: Profile) -> Plan:
    return Plan((replace(plan_of(profile, 1).bodies[0], deferred=2),), "fifo,by count")


def test_what_is_deferred_is_marked_and_its_memory_is_named():
    profile = chain(4)
    step = Step.of(profile, deferring(profile))
    first = {m.pieces[0] for m in step.after.messages if m.deferred}
    assert len(first) == 2
    assert {row[0] for row in least_slack(step).rows if row[0].endswith(" (deferred)")} == {
        f"{n} (deferred)" for n in first
    }
    assert (
        "2 transfers in 2 messages; their gradients are kept until then, 2.0 MB of extra memory" in summary(step).note
    )
    assert "(deferred)" not in text([Entry("step", Step.of(profile, plan_of(profile, 1)))])


def test_a_deferred_plan_s_time_is_that_of_its_own_arm():
    profile = chain(4)
    step = Step.of(profile, deferring(profile))
    record = Record(profile.key, "f", chosen="deferred", arms={"deferred": (0.1,), "measured": (0.2,)})
    rows = {row[0]: row[4] for row in summary(step, record).rows}
    assert rows["after: fifo,by count, updates in the next step  (this one runs)"] == "100.0"
    assert rows["plan from the profile"] == "200.0"


def test_a_loose_plan_says_that_horovod_fuses_the_rest():
    profile = chain(4)
    body = loosened(deferring(profile).bodies[0])
    step = Step.of(profile, Plan((body,), "fifo,by count"))
    record = Record(profile.key, "f", chosen="loose", arms={"loose": (0.1,), "deferred": (0.2,)})
    rows = {row[0]: row[4] for row in summary(step, record).rows}
    label = "after: fifo,by count, updates in the next step, the rest fused by Horovod"
    assert rows[f"{label}  (this one runs)"] == "100.0"
    assert rows["plan with updates in the next step"] == "200.0"


def test_a_deferred_transfer_is_ready_from_the_start_and_its_readers_wait_for_it():
    profile = chain(4)
    step = Step.of(profile, deferring(profile))
    ready = ready_times(profile, step.after)
    ends = {s.name: s.end for s in step.after.spans}
    for message in step.after.messages:
        (name,) = message.pieces
        assert ready[name] == message.ready == (0.0 if message.deferred else ends[f"{name}_gradient"])


def test_the_page_and_the_trace_mark_what_is_deferred():
    profile = chain(4)
    entries = (Entry("step", Step.of(profile, deferring(profile))),)
    events = json.loads(to_json(entries))["traceEvents"]
    assert sum("deferred" in event.get("args", {}) for event in events) == 2
    assert html(entries).count(" (deferred)</th>") == 2 + 2  # least slack, all messages
