"""Step time: forms of device profiles, fitted to logs or learned while an engine serves.

The emulated executor, the prefill law and the replica law predict with the same objects, so they
agree on the cost of a step. Nothing here reads a file.
"""

from __future__ import annotations

from goodput_core.steptime.forms import (
    DeviceForm,
    DistServeForm,
    LinearTime,
    RooflineForm,
    StepShape,
    StepTimeForm,
    TableForm,
    UnitForm,
    largest_prefill,
)
from goodput_core.steptime.online import OnlineStepTime, RegimesForm
from goodput_core.steptime.piecewise import PiecewiseForm

__all__ = [
    "DeviceForm",
    "DistServeForm",
    "LinearTime",
    "OnlineStepTime",
    "PiecewiseForm",
    "RegimesForm",
    "RooflineForm",
    "StepShape",
    "StepTimeForm",
    "TableForm",
    "UnitForm",
    "largest_prefill",
]
