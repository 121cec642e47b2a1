"""Agreement between ranks: every rank shows what it has, one rank judges, all get the same verdict or the same error.

Goes through the key-value store of Horovod's launcher (Gloo), not through collectives: a rank that never arrives is
then named instead of waited for for ever. Without that store (MPI) an all-gather with a time limit takes its place.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
from horovod.common import process_sets

_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # the store is never behind a proxy
_POLL_SECONDS = (0.02, 0.25)  # the first pause, and what it grows to: the store serves all ranks
_EXIT_SECONDS = 3.0
_turns: dict[str, int] = {}

Judge = Callable[[dict[int, Any]], dict[str, Any]]


class AgreementError(Exception):  # not RuntimeError: AutoGraph keeps the type of plain exceptions only
    """The ranks do not agree, or one of them did not arrive. Raised on every rank."""


def world() -> tuple[int, ...]:
    """The ranks of this job; just this one before hvd.init()."""
    return tuple(range(hvd.size())) if hvd.is_initialized() else (0,)


_known = (0, 1)  # before hvd.init()


def here() -> tuple[int, int]:
    """(this rank, how many there are), also when Horovod has been shut down."""
    global _known
    with contextlib.suppress(ValueError):  # Horovod may be shut down at any time
        _known = hvd.rank(), hvd.size()
    return _known


def members(process_set_ids: Iterable[int]) -> tuple[int, ...]:
    """The ranks of all these process sets together, sorted."""
    known = process_sets._basics._get_process_set_ids_and_ranks()
    return tuple(sorted({rank for i in set(process_set_ids) for rank in known[i]}))


def agree(topic: str, payload: Any, judge: Judge, ranks: Sequence[int], timeout_seconds: float) -> dict[str, Any]:
    """Shows `payload` (plain data) to the others and returns the verdict all ranks share.

    topic: what this is about; the n-th call with a topic and `ranks` on one rank meets the n-th on the others.
    judge: from {rank: payload} to the verdict, a dict; runs on one rank (or on all, alike). Its key "error", if there,
    is raised as AgreementError on every rank. A rank that does not come within `timeout_seconds` is named in one.
    """
    if len(ranks) < 2:
        return judge({ranks[0]: payload})
    meeting = f"{topic}.{'all' if len(ranks) == hvd.size() else '-'.join(map(str, ranks))}"
    _turns[meeting] = _turns.get(meeting, -1) + 1
    key = f"{meeting}.{_turns[meeting]}"
    store = _store()
    if store is not None:
        verdict = _through_store(store, key, payload, judge, ranks, timeout_seconds)
    else:
        verdict = _through_allgather(key, payload, judge, ranks, timeout_seconds)
    if "error" in verdict:
        raise fatal(verdict["error"])
    return verdict


def fatal(text: str) -> AgreementError:
    """The error to raise. Should the process then hang in Horovod's shutdown, which waits for the others, end it."""
    atexit.register(lambda: threading.Thread(target=_end_soon, daemon=True).start())
    return AgreementError(f"tf_caramel, rank {here()[0]}: {text}")


def _end_soon() -> None:
    time.sleep(_EXIT_SECONDS)
    os._exit(1)


_away = False


def leave(why: str) -> None:
    """Tells the others that this rank has left training with an error. Nothing without the launcher's store."""
    global _away
    if here()[1] > 1 and _tell(why):
        _away = True


def back() -> None:
    """If this rank has left, it is back."""
    global _away
    if _away:
        _away = not _tell(None)


def _tell(why: str | None) -> bool:
    store = _store()
    if store is None:
        return False
    try:
        store.put(f"left.{here()[0]}", why)
        store.put("left", True)
    except (urllib.error.URLError, OSError):
        return False  # the launcher has gone, and so will the others
    return True


def left() -> dict[int, str]:
    """The ranks that have left, and why. One request if there are none; nobody without a store."""
    store = _store()
    try:
        if store is None or not store.get("left"):
            return {}
        told = {rank: store.get(f"left.{rank}") for rank in range(here()[1])}
    except (urllib.error.URLError, OSError):
        return {}
    return {rank: why for rank, why in told.items() if why is not None}


def _store() -> _Store | None:
    """The launcher's; None without one."""
    address, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return _Store(f"http://{address}:{port}/tf_caramel") if address and port else None


class _Store:
    def __init__(self, url: str) -> None:
        self.url = url

    def put(self, key: str, value: Any) -> None:
        request = urllib.request.Request(f"{self.url}/{key}", data=json.dumps(value).encode(), method="PUT")
        with _open(request, timeout=5):
            pass

    def get(self, key: str) -> Any:
        """The value, or None if nobody has put it yet."""
        try:
            with _open(f"{self.url}/{key}", timeout=5) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


def _through_store(
    store: _Store, key: str, payload: Any, judge: Judge, ranks: Sequence[int], timeout_seconds: float
) -> dict[str, Any]:
    me, leader = hvd.rank(), min(ranks)
    deadline = time.monotonic() + timeout_seconds
    try:
        store.put(f"{key}.{me}", payload)
        verdict: dict[str, Any] | None = None
        pause, longest = _POLL_SECONDS
        shown: dict[int, Any] = {}
        while verdict is None:
            verdict = store.get(f"{key}.verdict")
            if verdict is None and me == leader:
                for rank in ranks:
                    if rank not in shown and (value := store.get(f"{key}.{rank}")) is not None:
                        shown[rank] = value
                if len(shown) == len(ranks):
                    verdict = judge(shown)
                    store.put(f"{key}.verdict", verdict)
            if verdict is None and time.monotonic() > deadline:
                late = [rank for rank in ranks if store.get(f"{key}.{rank}") is None]
                verdict = {"error": _nobody_came(key, late or [leader], timeout_seconds)}
                store.put(f"{key}.verdict", verdict)
            if verdict is None:
                time.sleep(pause)
                pause = min(longest, pause * 1.3)
        return verdict
    except (urllib.error.URLError, OSError) as error:
        return {"error": f"lost the launcher's store at {store.url} while agreeing on {key} ({error})"}


def _through_allgather(
    key: str, payload: Any, judge: Judge, ranks: Sequence[int], timeout_seconds: float
) -> dict[str, Any]:
    shown: list[Any] = []
    process_set = hvd.global_process_set
    if len(ranks) < hvd.size():
        raise fatal(f"{key}: process sets need Horovod's Gloo launcher (horovodrun)")

    def gather() -> None:
        shown.extend(hvd.allgather_object(json.dumps(payload), name=f"tf_caramel.{key}", process_set=process_set))

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if len(shown) != len(ranks):
        others = [rank for rank in ranks if rank != hvd.rank()]
        return {"error": _nobody_came(key, others, timeout_seconds, "at least one of ")}
    return judge({rank: json.loads(text) for rank, text in zip(ranks, shown, strict=True)})


def _nobody_came(key: str, late: Sequence[int], seconds: float, prefix: str = "") -> str:
    names = ", ".join(map(str, late[:8])) + (" ..." if len(late) > 8 else "")
    return (
        f"{prefix}rank{'s' if len(late) > 1 else ''} {names} did not arrive at {key!r} within {seconds:g} s. Either it "
        "is still busy or stuck (TF_CARAMEL_TIMEOUT sets another limit in seconds), or its program does not use "
        "tf_caramel in the same way: check TF_CARAMEL and the optimizer's wrapper on that rank."
    )
