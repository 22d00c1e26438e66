"""Fitting of a device profile to timed steps, with its prediction error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

import yaml

from goodput_core.errors import InputError
from goodput_core.quantiles import P50, P95, quantiles
from goodput_core.steptime import PiecewiseForm, RooflineForm
from goodput_core.steptime.fitting import (
    errors_ppm,
    fit_roofline,
    hold_out,
    nonnegative_least_squares,
)
from goodput_core.steptime.piecewise import fit_piecewise
from goodput_core.units import NS_PER_MS, NS_PER_US
from goodput_engine.device.load import COMMON_NUMBERS, load_profile
from goodput_engine.device.profile import Overlap
from goodput_engine.device.step_log import read_host_gaps, read_step_log

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from goodput_core.steptime.fitting import StepSample
    from goodput_engine.device.profile import DeviceProfile

__all__ = [
    "DeviceFit",
    "FittedForm",
    "FormChoice",
    "fit_device",
    "fit_form",
    "form_numbers",
    "save_profile",
    "write_profile",
]

FittedForm = RooflineForm | PiecewiseForm

_MIN_STEPS: Final = 100
_DIGITS: Final = 6
# The piecewise form has more numbers than the roofline. It must pay in a smaller error.
_PIECEWISE_PERCENT: Final = 80
_MAX_HOST_RATIO: Final = 3
"""Pauses longer than this multiple of the median are not the host's work."""


class FormChoice(StrEnum):
    """The form that is fitted."""

    AUTO = "auto"
    """The roofline, unless the median or mean error of the piecewise form is a fifth smaller."""
    ROOFLINE = "roofline"
    PIECEWISE = "piecewise"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """A step-time law fitted to a step log.

    Args:
        form: the fitted law.
        steps: number of steps in the log.
        held_out_steps: number of steps, a fifth of the log, that were excluded from the fit.
        p50_error_ppm, p95_error_ppm: quantiles of the absolute prediction errors for the held-out
            steps, in millionths of the measured time.
        host_numbers: host time between two steps, with the names and units of a profile; empty if
            the log does not show it.
    """

    form: FittedForm
    steps: int
    held_out_steps: int
    p50_error_ppm: int
    p95_error_ppm: int
    host_numbers: Mapping[str, float]

    @property
    def error(self) -> str:
        """The prediction errors for held-out steps, as a clause."""
        return f"p50 {self.p50_error_ppm / 10_000:.2f} %, p95 {self.p95_error_ppm / 10_000:.2f} %"


def fit_device(log: Path, choice: FormChoice = FormChoice.AUTO) -> DeviceFit:
    """Fit a law to a step log.

    Raises:
        InputError: the file is not a step log, or its steps do not determine the law.
        UsageError: pyarrow is not installed.
    """
    samples = read_step_log(log)
    if len(samples) < _MIN_STEPS:
        raise InputError(f"{log}: has {len(samples)} steps; a fit needs at least {_MIN_STEPS}")
    training, held_out = hold_out(samples)
    try:
        form = fit_form(training, choice)
    except ValueError as error:
        raise InputError(f"{log}: {error}") from error
    p50, p95 = quantiles(errors_ppm(form, held_out), (P50, P95))
    return DeviceFit(
        form=form,
        steps=len(samples),
        held_out_steps=len(held_out),
        p50_error_ppm=p50,
        p95_error_ppm=p95,
        host_numbers=_fit_host_time(read_host_gaps(log)),
    )


def fit_form(samples: Sequence[StepSample], choice: FormChoice) -> FittedForm:
    """Fit a law to steps.

    Raises:
        ValueError: the steps do not determine the law.
    """
    if choice is FormChoice.PIECEWISE:
        return fit_piecewise(samples)
    roofline = fit_roofline(samples)
    if choice is FormChoice.ROOFLINE:
        return roofline
    piecewise = fit_piecewise(samples)
    of_roofline, of_piecewise = (errors_ppm(form, samples) for form in (roofline, piecewise))
    # Most steps only decode, so the median can be that of decodes alone. The mean can be that of a
    # few delayed steps, which no form predicts.
    pays = any(
        average(of_piecewise) * 100 < average(of_roofline) * _PIECEWISE_PERCENT
        for average in (median, mean)
    )
    return piecewise if pays else roofline


def form_numbers(form: FittedForm) -> dict[str, float]:
    """Return the coefficients of a law, with the names and units of a profile."""
    match form:
        case RooflineForm():
            values = {
                "c0_ms": form.c0_ns / NS_PER_MS,
                "c1_us_per_token": form.c1_ns_per_token / NS_PER_US,
                "c2_ns_per_context_token": form.c2_ns_per_context_token,
                "c4_us_per_request": form.c4_ns_per_request / NS_PER_US,
            }
        case PiecewiseForm():
            values = {
                "c2_ns_per_context_token": form.c2_ns_per_context_token,
                "c3_ns_per_square": form.c3_ns_per_square,
                "c4_us_per_request": form.c4_ns_per_request / NS_PER_US,
            }
    return {name: _rounded(value) for name, value in values.items()}


def write_profile(fit: DeviceFit, *, log: Path, base: DeviceProfile, out: Path) -> None:
    """Write a profile with the fitted law and all other numbers of another profile.

    The host time is that of the log if the base's host and device do not overlap.

    Args:
        fit: the law.
        log: the step log.
        base: profile with the numbers that a step log lacks, such as the KV capacity.
        out: the file to write; it must not exist.

    Raises:
        InputError: the file exists or cannot be written.
    """
    numbers: dict[str, tuple[float, str]] = {
        name: (base.numbers[name], f"{base.name}: {base.provenance[name]}")
        for name in COMMON_NUMBERS
        if name in base.numbers
    }
    if base.overlap is Overlap.ADD:
        origin = f"median pause between two steps of {log.name}"
        numbers |= {name: (value, origin) for name, value in fit.host_numbers.items()}
    save_profile(
        fit.form,
        origin=f"fitted to {fit.steps:,} steps of {log.name}; held-out step error {fit.error}",
        description=f"Step times fitted to {log.name}; all other numbers from {base.name}.",
        overlap=base.overlap,
        numbers=numbers,
        out=out,
        illustrative=base.illustrative,
    )


def save_profile(
    form: FittedForm,
    *,
    origin: str,
    description: str,
    overlap: Overlap,
    numbers: Mapping[str, tuple[float, str]],
    out: Path,
    illustrative: bool = False,
) -> None:
    """Write a profile, and check that it can be loaded.

    Args:
        form: the fitted law.
        origin: the origin of its numbers.
        description: one sentence for a list.
        overlap: combination of the host time and the device time.
        numbers: all other numbers, each with its origin.
        out: the file to write; it must not exist.
        illustrative: True if the profile describes no existing device.

    Raises:
        InputError: the file exists or cannot be written.
    """
    profile: dict[str, Any] = {
        "name": out.stem,
        "description": description,
        "illustrative": illustrative,
        "form": "piecewise" if isinstance(form, PiecewiseForm) else "roofline",
        "overlap": overlap.value,
    }
    if isinstance(form, PiecewiseForm):
        profile["curve"] = {
            "from": origin,
            "tokens": list(form.tokens),
            "step_ms": [_rounded(time_ns / NS_PER_MS) for time_ns in form.times_ns],
        }
    profile["numbers"] = {
        name: {"value": value, "from": source}
        for name, (value, source) in [
            *((name, (value, origin)) for name, value in form_numbers(form).items()),
            *numbers.items(),
        ]
    }
    text = yaml.safe_dump(profile, sort_keys=False, allow_unicode=True, width=100)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise InputError(f"{out} exists; name another file") from error
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from error
    load_profile(str(out.absolute()))


def _fit_host_time(gaps: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the host time of a step as numbers of a profile; empty without pauses.

    Args:
        gaps: requests of a step, and the nanoseconds from the end of the previous step to its
            start, of steps that the device had to wait for.
    """
    if len(gaps) < _MIN_STEPS:
        return {}
    most_ns = _MAX_HOST_RATIO * median(gap_ns for _, gap_ns in gaps)
    kept = [(requests, gap_ns) for requests, gap_ns in gaps if gap_ns <= most_ns]
    requests_sum = float(sum(requests for requests, _ in kept))
    gram = [
        [float(len(kept)), requests_sum],
        [requests_sum, float(sum(requests * requests for requests, _ in kept))],
    ]
    right = [
        float(sum(gap_ns for _, gap_ns in kept)),
        float(sum(requests * gap_ns for requests, gap_ns in kept)),
    ]
    fixed_ns, request_ns = nonnegative_least_squares(gram, right)
    return {
        "host_ms_per_step": _rounded(fixed_ns / NS_PER_MS),
        "host_us_per_request": _rounded(request_ns / NS_PER_US),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
