"""`goodput device`: which device profiles there are, and where each of their numbers is from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from goodput_core.cli import CommandParser
from goodput_core.units import NS_PER_MS, NS_PER_US
from goodput_engine.device.load import list_profiles, load_profile

if TYPE_CHECKING:
    import argparse

    from goodput_engine.device.profile import DeviceProfile

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """List or show device profiles on stdout.

    Raises:
        UsageError: an unknown subcommand or option.
        InputError: no such profile, or one that breaks a rule.
    """
    args = _parse(argv)
    if args.action == "list":
        _list(as_json=args.json)
    else:
        _show(load_profile(args.name), as_json=args.json)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="goodput device",
        summary="Device profiles: what `--device` and emulated:// can name.",
        examples=(
            "goodput device list",
            "goodput device show llama-3-8b-h100",
            "goodput device show ./mine.yaml --json",
        ),
    )
    # CommandParser takes `prog` by position, which argparse's own subparsers do not give.
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog=parser.prog
    )
    listing = actions.add_parser("list", help="the shipped profiles")
    show = actions.add_parser("show", help="one profile, with where each number is from")
    show.add_argument("name", metavar="NAME", help="a shipped profile, or the path of a YAML file")
    for action in (listing, show):
        action.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


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
            row["name"],
            row["form"],
            f"{row['kv_tokens']:,}",
            f"{row['max_model_tokens']:,}",
            row["description"],
        )
    Console(markup=False, highlight=False).print(table)


def _summary(profile: DeviceProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "description": profile.description,
        "form": profile.form_name,
        "tensor_parallel": profile.tensor_parallel,
        "kv_tokens": profile.kv_blocks * profile.block_size,
        "max_model_tokens": profile.max_model_tokens,
    }


def _show(profile: DeviceProfile, *, as_json: bool) -> None:
    facts: dict[str, Any] = msgspec.to_builtins(profile)
    if as_json:
        _print_json(facts)
        return
    console = Console(markup=False, highlight=False)
    console.print(f"{profile.name}: {profile.description}")
    table = Table(box=None, pad_edge=False)
    table.add_column("number")
    table.add_column("value", justify="right")
    table.add_column("from", overflow="fold")
    values = {**facts, **facts["form"]}
    for number, origin in profile.provenance.items():
        table.add_row(number, _in_file_units(number, values), origin)
    console.print(table)


# How the profile's file writes what the profile holds in base units.
_CONVERTED: Final = {
    "c0_ms": ("c0_ns", NS_PER_MS),
    "c1_us_per_token": ("c1_ns_per_token", NS_PER_US),
    "c4_us_per_request": ("c4_ns_per_request", NS_PER_US),
    "unit_ms": ("unit_ns", NS_PER_MS),
    "host_ms_per_step": ("host_ns_per_step", NS_PER_MS),
    "host_us_per_request": ("host_ns_per_request", NS_PER_US),
    "swap_gb_per_s": ("swap_bytes_per_s", 1_000_000_000),
    "link_gb_per_s": ("link_bytes_per_s", 1_000_000_000),
}


def _in_file_units(number: str, values: dict[str, Any]) -> str:
    name, unit = _CONVERTED.get(number, (number, 1))
    return f"{values[name] / unit:,.10g}"


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))  # noqa: T201 - the command's answer
