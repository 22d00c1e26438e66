"""`goodput device`: list, show and fit device profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from goodput_core.cli import CommandParser
from goodput_core.errors import UsageError
from goodput_core.steptime import PiecewiseForm, TableForm
from goodput_core.text import printable
from goodput_core.units import NS_PER_MS
from goodput_engine.device.fit import FormChoice, fit_device, form_numbers, write_profile
from goodput_engine.device.load import list_profiles, load_profile

if TYPE_CHECKING:
    import argparse

    from goodput_engine.device.profile import DeviceProfile

__all__ = ["main", "make_parser"]


def main(argv: list[str]) -> int:
    """List, show or fit device profiles; the result is printed on stdout.

    Raises:
        UsageError: the subcommand or an option is unknown.
        InputError: the profile or the step log is missing or invalid.
    """
    args = _parse(argv)
    if args.action == "list":
        _list(as_json=args.json)
    elif args.action == "show":
        _show(load_profile(args.name), as_json=args.json)
    else:
        _fit(args)
    return 0


def make_parser() -> CommandParser:
    """Build the parser of `goodput device`."""
    parser = CommandParser(
        prog="goodput device",
        summary="List, show and fit device profiles, which `--device` and emulated:// name.",
        examples=(
            "goodput device list",
            "goodput device show llama-3-8b-h100",
            "goodput device show ./mine.yaml --json",
            "goodput device fit steps.parquet --base llama-3-8b-h100 --out mine.yaml",
            "goodput device calibrate runs/vllm --out mine.yaml",
        ),
    )
    # CommandParser takes `prog` by position, which argparse's own subparsers do not give.
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog=parser.prog
    )
    listing = actions.add_parser(
        "list",
        help="list the shipped profiles",
        summary="List the profiles that `--device` and emulated:// accept by name.",
        examples=("goodput device list", "goodput device list --json"),
    )
    show = actions.add_parser(
        "show",
        help="show one profile, with the origin of each number",
        summary="Show every number of a profile, with its origin.",
        examples=("goodput device show llama-3-8b-h100", "goodput device show ./mine.yaml --json"),
    )
    show.add_argument("name", metavar="NAME", help="a shipped profile, or the path of a YAML file")
    fit = actions.add_parser(
        "fit",
        help="fit step times to the step log of `goodput engine`",
        summary="Fit a law of step times to the step log of `goodput engine --step-log`.",
        examples=(
            "goodput device fit steps.parquet",
            "goodput device fit steps.parquet --base llama-3-8b-h100 --out mine.yaml",
        ),
    )
    fit.add_argument("log", type=Path, metavar="STEPS.parquet", help="the step log")
    fit.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE.yaml",
        help="write a profile with the fitted step times",
    )
    fit.add_argument(
        "--base",
        metavar="PROFILE",
        help="with --out: the profile from which all other numbers are taken",
    )
    fit.add_argument(
        "--form",
        choices=[one.value for one in FormChoice],
        default=FormChoice.AUTO.value,
        help="the form to fit; auto is the roofline, unless the piecewise form has a clearly "
        "smaller error (%(default)s)",
    )
    for action in (listing, show, fit):
        action.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    args = make_parser().parse_args(argv)
    if args.action == "fit":
        if (args.out is None) != (args.base is None):
            raise UsageError(
                "goodput device fit: --out and --base must be given together: a step log has no "
                "figures for memory and bandwidths, so these are taken from the profile --base"
            )
        if args.out is not None and args.out.suffix not in {".yaml", ".yml"}:
            raise UsageError(f"goodput device fit: --out: {args.out} must end in .yaml")
    return args


def _list(*, as_json: bool) -> None:
    profiles = [load_profile(name) for name in list_profiles()]
    if as_json:
        _print_json([_summary(profile) for profile in profiles])
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "form", "kv tokens", "max tokens", "description"):
        table.add_column(heading, justify="right" if "tokens" in heading else "left")
    for profile in profiles:
        row = _summary(profile)
        table.add_row(
            printable(row["name"]),
            row["form"],
            f"{row['kv_tokens']:,}",
            f"{row['max_model_tokens']:,}",
            printable(row["description"]),
        )
    Console(markup=False, highlight=False).print(table)


def _summary(profile: DeviceProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "description": profile.description,
        "illustrative": profile.illustrative,
        "form": profile.form_name,
        "tensor_parallel": profile.tensor_parallel,
        "pipeline_parallel": profile.pipeline_parallel,
        "kv_tokens": profile.kv_blocks * profile.block_size,
        "max_model_tokens": profile.max_model_tokens,
    }


def _show(profile: DeviceProfile, *, as_json: bool) -> None:
    fields: dict[str, Any] = msgspec.to_builtins(profile)
    if as_json:
        _print_json(fields)
        return
    console = Console(markup=False, highlight=False)
    console.print(printable(f"{profile.name}: {profile.description}"))
    if profile.illustrative:
        console.print(
            "Illustrative: these figures describe no real device; do not plan capacity with them."
        )
    numbers = Table(box=None, pad_edge=False)
    numbers.add_column("number")
    numbers.add_column("value", justify="right")
    numbers.add_column("from", overflow="fold")
    for number, value in profile.numbers.items():
        numbers.add_row(number, f"{value:,.10g}", printable(profile.provenance[number]))
    console.print(numbers)
    if isinstance(profile.form, TableForm):
        console.print()
        source = printable(profile.provenance["table"])
        console.print(f"table of step times in ms, from: {source}")
        console.print(_step_times_table(profile.form))
    if isinstance(profile.form, PiecewiseForm):
        console.print()
        source = printable(profile.provenance["curve"])
        console.print(f"step times in ms by tokens, from: {source}")
        console.print(_curve_table(profile.form))


def _curve_table(form: PiecewiseForm) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("ms", justify="right")
    for tokens, time_ns in zip(form.tokens, form.times_ns, strict=True):
        table.add_row(f"{tokens:,}", f"{time_ns / NS_PER_MS:.6g}")
    return table


def _step_times_table(form: TableForm) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("decodes", justify="right")
    for tokens in form.prefill_tokens:
        table.add_column(f"+{tokens}", justify="right")
    for decodes, times_ns in zip(form.decodes, form.times_ns, strict=True):
        table.add_row(str(decodes), *(f"{time_ns / NS_PER_MS:.10g}" for time_ns in times_ns))
    return table


def _fit(args: argparse.Namespace) -> None:
    base = None if args.base is None else load_profile(args.base)
    fit = fit_device(args.log, FormChoice(args.form))
    if base is not None:
        write_profile(fit, log=args.log, base=base, out=args.out)
    if args.json:
        _print_json(
            {
                "form": "piecewise" if isinstance(fit.form, PiecewiseForm) else "roofline",
                **form_numbers(fit.form),
                **(
                    {
                        "tokens": list(fit.form.tokens),
                        "step_ms": [time_ns / NS_PER_MS for time_ns in fit.form.times_ns],
                    }
                    if isinstance(fit.form, PiecewiseForm)
                    else {}
                ),
                **fit.host_numbers,
                "steps": fit.steps,
                "held_out_steps": fit.held_out_steps,
                "p50_error": fit.p50_error_ppm / 1_000_000,
                "p95_error": fit.p95_error_ppm / 1_000_000,
                "profile": None if args.out is None else str(args.out),
            }
        )
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("number")
    table.add_column("value", justify="right")
    for name, value in [*form_numbers(fit.form).items(), *fit.host_numbers.items()]:
        table.add_row(name, f"{value:,.10g}")
    console = Console(markup=False, highlight=False)
    console.print(table)
    if isinstance(fit.form, PiecewiseForm):
        console.print(_curve_table(fit.form))
    console.print(
        f"{fit.steps:,} steps; of the {fit.held_out_steps:,} held out, the prediction is off by "
        f"{fit.p50_error_ppm / 10_000:.2f} % (p50) and {fit.p95_error_ppm / 10_000:.2f} % (p95)"
    )
    if args.out is not None:
        console.print(f"wrote {printable(str(args.out))}", soft_wrap=True)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))  # noqa: T201 - the command's output
