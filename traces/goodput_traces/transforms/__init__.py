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
from goodput_traces.transforms.sessions import SessionArrivals, parse_session_arrivals

__all__ = [
    "ClassRule",
    "SessionArrivals",
    "TransformPlan",
    "Window",
    "apply",
    "parse_class_rules",
    "parse_factor",
    "parse_session_arrivals",
    "parse_window",
    "scale_rate",
    "warp_time",
]
