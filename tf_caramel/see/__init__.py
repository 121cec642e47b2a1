"""What a person sees of a plan: tables in the terminal, one HTML page, a Chrome trace. No TensorFlow import.

`report(folder)` reads what a run left behind; `str()` of the result is the tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_caramel.see.reports import Report, report

__all__ = ["Report", "report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tf_caramel.see' has no attribute {name!r}")
    from tf_caramel.see import reports

    return getattr(reports, name)
