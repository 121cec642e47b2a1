"""Where updates may stay pending between calls."""

from __future__ import annotations

from typing import Any


def across(step: Any) -> bool:
    return bool(step.config.defer == "across")
