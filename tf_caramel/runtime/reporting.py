"""What this process measured and decided, as a report."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tf_caramel.runtime import hook
from tf_caramel.runtime.cache import Cache
from tf_caramel.see.reports import Report
from tf_caramel.see.reports import report as report_on


def report() -> Report:
    """Of each step that was rewritten here: what was measured, what was decided, and why anything was not done.

    `print(tf_caramel.report())` is a table; `.html(path)` writes a page with the timeline, `.chrome(path)` a trace for
    Perfetto. The profile is known on the rank that plans, which is rank 0; elsewhere only what was decided.
    Raises RuntimeError if nothing was rewritten.
    """
    steps = hook.steps()
    if not steps:
        raise RuntimeError("nothing to report: no step was rewritten in this process (is TF_CARAMEL=1 set?)")
    with tempfile.TemporaryDirectory(prefix="caramel-report-") as folder:
        for step in steps:
            kept = Cache(step.config.cache).entry(step.key)
            if step.kept and step.tuner.profile is None and kept is not None and (kept / "profile.json").is_file():
                shutil.copytree(kept, Path(folder, step.key))
            else:
                step.write(Cache(folder))
        return report_on(folder)
