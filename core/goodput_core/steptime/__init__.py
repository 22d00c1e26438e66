"""How long a step of a device takes: the forms a device profile may have, and their prediction.

The engine's emulated executor, the engine's own budget law and the operator's capacity law all
predict with these objects, so they agree on what a step costs. Nothing here reads a file.
"""

from __future__ import annotations

from goodput_core.steptime.budget import largest_prefill
from goodput_core.steptime.distserve import DistServeForm, LinearTime
from goodput_core.steptime.form import DeviceForm, StepTimeForm
from goodput_core.steptime.online import OnlineStepTime
from goodput_core.steptime.regimes import ArithmeticTime, RegimesForm
from goodput_core.steptime.roofline import RooflineForm
from goodput_core.steptime.shape import StepShape
from goodput_core.steptime.table import TableForm
from goodput_core.steptime.unit import UnitForm

__all__ = [
    "ArithmeticTime",
    "DeviceForm",
    "DistServeForm",
    "LinearTime",
    "OnlineStepTime",
    "RegimesForm",
    "RooflineForm",
    "StepShape",
    "StepTimeForm",
    "TableForm",
    "UnitForm",
    "largest_prefill",
]
