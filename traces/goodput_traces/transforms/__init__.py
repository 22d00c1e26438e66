"""Transforms of a trace for a replay: pure functions from a stream of rows to a stream of rows."""

from __future__ import annotations

from goodput_traces.transforms.classes import ClassRule, parse_class_rules
from goodput_traces.transforms.plan import (
    TransformPlan,
    Window,
    apply,
    parse_factor,
    parse_window,
    warp_time,
)
from goodput_traces.transforms.scale import scale_rate

__all__ = [
    "ClassRule",
    "TransformPlan",
    "Window",
    "apply",
    "parse_class_rules",
    "parse_factor",
    "parse_window",
    "scale_rate",
    "warp_time",
]
