"""Fitting of a device profile to a step log, with its prediction error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import yaml

from goodput_core.errors import InputError
from goodput_core.quantiles import P50, P95, quantiles
from goodput_core.steptime import RooflineForm
from goodput_core.steptime.fitting import errors_ppm, fit_roofline, hold_out
from goodput_core.units import NS_PER_MS, NS_PER_US
from goodput_engine.device.load import COMMON_NUMBERS, load_profile
from goodput_engine.device.step_log import read_step_log

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_engine.device.profile import DeviceProfile

__all__ = ["DeviceFit", "fit_device", "write_profile"]

_MIN_STEPS: Final = 100
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """A step-time law fitted to a step log.

    Args:
        form: the fitted roofline.
        steps: number of steps in the log.
        held_out_steps: number of steps, a fifth of the log, that were excluded from the fit.
        p50_error_ppm, p95_error_ppm: quantiles of the absolute prediction errors for the held-out
            steps, in millionths of the measured time.
    """

    form: RooflineForm
    steps: int
    held_out_steps: int
    p50_error_ppm: int
    p95_error_ppm: int

    @property
    def numbers(self) -> dict[str, float]:
        """The coefficients, with the names and units of a profile."""
        form = self.form
        values = {
            "c0_ms": form.c0_ns / NS_PER_MS,
            "c1_us_per_token": form.c1_ns_per_token / NS_PER_US,
            "c2_ns_per_context_token": form.c2_ns_per_context_token,
            "c4_us_per_request": form.c4_ns_per_request / NS_PER_US,
        }
        return {name: float(f"{value:.{_DIGITS}g}") for name, value in values.items()}


def fit_device(log: Path) -> DeviceFit:
    """Fit a roofline to a step log.

    Raises:
        InputError: the file is not a step log, or its steps do not determine the law.
        UsageError: pyarrow is not installed.
    """
    samples = read_step_log(log)
    if len(samples) < _MIN_STEPS:
        raise InputError(f"{log}: has {len(samples)} steps; a fit needs at least {_MIN_STEPS}")
    training, held_out = hold_out(samples)
    try:
        form = fit_roofline(training)
    except ValueError as error:
        raise InputError(f"{log}: {error}") from error
    p50, p95 = quantiles(errors_ppm(form, held_out), (P50, P95))
    return DeviceFit(
        form=form,
        steps=len(samples),
        held_out_steps=len(held_out),
        p50_error_ppm=p50,
        p95_error_ppm=p95,
    )


def write_profile(fit: DeviceFit, *, log: Path, base: DeviceProfile, out: Path) -> None:
    """Write a profile with the fitted law and all other numbers of another profile.

    Args:
        fit: the law.
        log: the step log.
        base: profile with the numbers that a step log lacks, such as the KV capacity.
        out: the file to write; it must not exist.

    Raises:
        InputError: the file exists or cannot be written.
    """
    origin = (
        f"fitted to {fit.steps:,} steps of {log.name}; held-out step error p50 "
        f"{fit.p50_error_ppm / 10_000:.2f} %, p95 {fit.p95_error_ppm / 10_000:.2f} %"
    )
    numbers: dict[str, Any] = {
        name: {"value": value, "from": origin} for name, value in fit.numbers.items()
    }
    for name in COMMON_NUMBERS:
        if name in base.numbers:
            origin = f"{base.name}: {base.provenance[name]}"
            numbers[name] = {"value": base.numbers[name], "from": origin}
    profile = {
        "name": out.stem,
        "description": f"Step times fitted to {log.name}; all other numbers from {base.name}.",
        "illustrative": base.illustrative,
        "form": "roofline",
        "overlap": base.overlap.value,
        "numbers": numbers,
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
