"""`goodput device calibrate RUN…`: a device profile from the records of runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from goodput_core.cli import CommandParser
from goodput_core.errors import ExitCode, InputError, UsageError
from goodput_core.steptime import PiecewiseForm
from goodput_core.text import printable
from goodput_core.units import NS_PER_MS
from goodput_engine.device.fit import FormChoice, form_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_replay.calibration.calibration import CalibratedDevice

__all__ = ["main", "make_parser"]

_UNSTEADY: Final = 1.5
"""Slowdown from which the speed of the server is reported as changed."""


def main(argv: Sequence[str]) -> int:
    """Calibrate a profile, and print its law and its errors.

    Args:
        argv: the arguments after `goodput device calibrate`.

    Raises:
        UsageError: an argument is invalid.
        InputError: a run cannot be used, or the profile cannot be written.
    """
    args = make_parser().parse_args(argv)
    out: Path | None = args.out
    if out is not None and out.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"goodput device calibrate: --out: {out} must end in .yaml")
    if out is not None and out.exists():
        raise InputError(f"{out} exists; name another file")
    # These load numpy and pyarrow.
    from goodput_engine.device.load import load_profile  # noqa: PLC0415
    from goodput_engine.manifest_file import read_manifest  # noqa: PLC0415
    from goodput_replay.calibration.calibration import (  # noqa: PLC0415
        ObservedRun,
        calibrate,
        write_profile,
    )
    from goodput_replay.calibration.requests import read_requests  # noqa: PLC0415

    base = None if args.base is None else load_profile(args.base)
    service = None if args.file is None else read_manifest(args.file)
    runs = [ObservedRun(folder=one, requests=read_requests(one)) for one in args.runs]
    found = calibrate(runs, choice=FormChoice(args.form), service=service, base=base)
    if out is not None:
        write_profile(found, runs=runs, out=out)
    if args.json:
        sys.stdout.write(json.dumps(_as_json(found, out), indent=2) + "\n")
    else:
        _print(found, out)
    return ExitCode.PASS


def make_parser() -> CommandParser:
    """Build the parser of `goodput device calibrate`."""
    parser = CommandParser(
        "goodput device calibrate",
        summary="Calibrate a device profile with the records of runs against any server.",
        examples=(
            "goodput device calibrate runs/vllm",
            "goodput device calibrate runs/vllm --out mine.yaml",
            "goodput device calibrate runs/one runs/two -f examples/chat.yaml --json",
        ),
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run whose responses were streamed",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="write the profile to this YAML file"
    )
    parser.add_argument(
        "-f",
        "--file",
        type=Path,
        metavar="MANIFEST",
        help="the LLMService that was measured, for its policy, token budget and SLO classes "
        "(default: the limits that the records show)",
    )
    parser.add_argument(
        "--base",
        metavar="PROFILE",
        help="the profile from which memory and bandwidths are taken (default: assumed ones)",
    )
    parser.add_argument(
        "--form",
        choices=[one.value for one in FormChoice],
        default=FormChoice.AUTO.value,
        help="the form to fit; auto is the roofline, unless the piecewise form has a clearly "
        "smaller error (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _as_json(found: CalibratedDevice, out: Path | None) -> dict[str, Any]:
    form = found.form
    curve: dict[str, Any] = {}
    if isinstance(form, PiecewiseForm):
        curve = {
            "tokens": list(form.tokens),
            "step_ms": [time_ns / NS_PER_MS for time_ns in form.times_ns],
        }
    return {
        "form": "piecewise" if curve else "roofline",
        **form_numbers(form),
        **curve,
        "policy": found.policy.value,
        "token_budget": found.token_budget,
        "max_num_seqs": found.max_num_seqs,
        "overlap": found.overlap.value,
        "requests": found.requests,
        "replicas": found.replicas,
        "steps": found.steps,
        "held_out_steps": found.held_out_steps,
        "slowdown": found.slowdown,
        "p50_error": found.p50_error_ppm / 1_000_000,
        "p95_error": found.p95_error_ppm / 1_000_000,
        "delay_ms": found.delay_ns / NS_PER_MS,
        "held_out_requests": found.held_out_requests,
        "latencies": [
            {
                "name": one.name,
                "measured_ms": one.measured_ms,
                "predicted_ms": one.predicted_ms,
                "error": one.error,
            }
            for one in found.latencies
        ],
        "profile": None if out is None else str(out),
    }


def _print(found: CalibratedDevice, out: Path | None) -> None:
    console = Console(markup=False, highlight=False)
    numbers = Table(box=None, pad_edge=False)
    numbers.add_column("number")
    numbers.add_column("value", justify="right")
    for name, value in form_numbers(found.form).items():
        numbers.add_row(name, f"{value:,.10g}")
    if isinstance(found.form, PiecewiseForm):
        for tokens, time_ns in zip(found.form.tokens, found.form.times_ns, strict=True):
            numbers.add_row(f"ms with {tokens:,} tokens", f"{time_ns / NS_PER_MS:,.6g}")
    console.print(numbers)
    p50, p95 = found.p50_error_ppm / 10_000, found.p95_error_ppm / 10_000
    lines = (
        f"{found.requests:,} requests on {found.replicas} replicas show {found.steps:,} steps",
        (
            f"{found.held_out_steps:,} held-out steps: the law is off by {p50:.2f} % (p50) and "
            f"{p95:.2f} % (p95)"
        ),
        f"the way to the server takes {found.delay_ns / NS_PER_MS:.3g} ms more than the profile",
        (
            f"{found.held_out_requests:,} held-out requests in virtual time, with policy "
            f"{found.policy}, a token budget of {found.token_budget:,} and at most "
            f"{found.max_num_seqs:,} running requests:"
        ),
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    if found.slowdown >= _UNSTEADY:
        console.print(
            f"warning: in a tenth of the run, steps took {found.slowdown:.2g} times as long as in "
            "another one with the same work; the speed of the server changed, so no profile "
            "describes all of the run: repeat it on a machine without other work",
            soft_wrap=True,
        )
    latencies = Table(box=None, pad_edge=False)
    latencies.add_column("metric")
    for heading in ("measured ms", "predicted ms", "error"):
        latencies.add_column(heading, justify="right")
    for one in found.latencies:
        latencies.add_row(
            one.name, f"{one.measured_ms:,.4g}", f"{one.predicted_ms:,.4g}", f"{one.error:+.1%}"
        )
    console.print(latencies)
    if out is not None:
        console.print(f"wrote {printable(str(out))}", soft_wrap=True)
