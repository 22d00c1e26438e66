"""What a replay may do to a trace: pure functions from rows to rows, applied as they stream."""

from __future__ import annotations

from goodput_traces.transforms.classes import ClassRule, assign_classes, parse_class_rules
from goodput_traces.transforms.plan import TransformPlan, apply
from goodput_traces.transforms.scale import scale_rate
from goodput_traces.transforms.speed import parse_factor, warp_time
from goodput_traces.transforms.window import Window, cut_window, parse_window

__all__ = [
    "ClassRule",
    "TransformPlan",
    "Window",
    "apply",
    "assign_classes",
    "cut_window",
    "parse_class_rules",
    "parse_factor",
    "parse_window",
    "scale_rate",
    "warp_time",
]
