"""The forms a profile may have: which fields each is written in, and the law they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from goodput_core.errors import InputError
from goodput_core.steptime import (
    DeviceForm,
    DistServeForm,
    LinearTime,
    RooflineForm,
    TableForm,
    UnitForm,
)
from goodput_core.units import NS_PER_MS, NS_PER_US, ms_to_ns
from goodput_engine.device.fields import (
    NumberRule,
    read_known,
    read_mapping,
    read_number,
    read_origin,
)

__all__ = ["FORMS", "FormRules", "read_table"]

_MS: Final = NumberRule(0, 100_000)
_US: Final = NumberRule(0, 1_000_000)
_NS: Final = NumberRule(0, 1_000_000_000)
_COUNT: Final = NumberRule(0, 100_000_000, whole=True)
_MAX_ROWS: Final = 64
_MAX_COLUMNS: Final = 256


@dataclass(frozen=True, slots=True)
class FormRules:
    """How one form is written.

    Args:
        numbers: its own numbers, beside those of every profile.
        build: from them to the law; None: it is written as a table.
    """

    numbers: Mapping[str, NumberRule]
    build: Callable[[Mapping[str, float]], DeviceForm] | None


def _roofline(numbers: Mapping[str, float]) -> DeviceForm:
    return RooflineForm(
        c0_ns=numbers["c0_ms"] * NS_PER_MS,
        c1_ns_per_token=numbers["c1_us_per_token"] * NS_PER_US,
        c2_ns_per_context_token=numbers["c2_ns_per_context_token"],
        c4_ns_per_request=numbers["c4_us_per_request"] * NS_PER_US,
    )


def _distserve(numbers: Mapping[str, float]) -> DeviceForm:
    return DistServeForm(
        prefill_fixed_ns=numbers["prefill_fixed_ms"] * NS_PER_MS,
        prefill_ns_per_token=numbers["prefill_us_per_token"] * NS_PER_US,
        prefill_ns_per_square=numbers["prefill_ns_per_square"],
        small=_decode(numbers, "small"),
        large=_decode(numbers, "large"),
        large_from_requests=int(numbers["decode_large_from_requests"]),
    )


def _decode(numbers: Mapping[str, float], regime: str) -> LinearTime:
    return LinearTime(
        fixed_ns=numbers[f"decode_{regime}_fixed_ms"] * NS_PER_MS,
        ns_per_context_token=numbers[f"decode_{regime}_ns_per_context_token"],
        ns_per_request=numbers[f"decode_{regime}_us_per_request"] * NS_PER_US,
    )


def _unit(numbers: Mapping[str, float]) -> DeviceForm:
    chunk = numbers.get("chunk_tokens")
    return UnitForm(
        unit_ns=ms_to_ns(numbers["unit_ms"]), chunk_tokens=None if chunk is None else int(chunk)
    )


FORMS: Final[Mapping[str, FormRules]] = {
    "roofline": FormRules(
        {
            "c0_ms": _MS,
            "c1_us_per_token": _US,
            "c2_ns_per_context_token": _NS,
            "c4_us_per_request": _US,
        },
        _roofline,
    ),
    "distserve": FormRules(
        {
            "prefill_fixed_ms": _MS,
            "prefill_us_per_token": _US,
            "prefill_ns_per_square": _NS,
            "decode_small_fixed_ms": _MS,
            "decode_small_ns_per_context_token": _NS,
            "decode_small_us_per_request": _US,
            "decode_large_fixed_ms": _MS,
            "decode_large_ns_per_context_token": _NS,
            "decode_large_us_per_request": _US,
            "decode_large_from_requests": NumberRule(1, 1_000_000, whole=True),
        },
        _distserve,
    ),
    "table": FormRules({}, None),
    "unit": FormRules(
        {
            "unit_ms": NumberRule(0.001, 1_000_000),
            "chunk_tokens": NumberRule(1, 100_000_000, whole=True, required=False),
        },
        _unit,
    ),
}


def read_table(value: object, source: str) -> tuple[TableForm, str]:
    """A profile's `table` and where it comes from.

    Raises:
        InputError: a field breaks a rule.
    """
    table = read_mapping(value, source, "table")
    read_known(table, ["decodes", "prefill_tokens", "step_ms", "from"], source, "table.")
    decodes = _line(table.get("decodes"), _COUNT, _MAX_ROWS, source, "table.decodes")
    columns = _line(
        table.get("prefill_tokens"), _COUNT, _MAX_COLUMNS, source, "table.prefill_tokens"
    )
    rows = _list(table.get("step_ms"), _MAX_ROWS, source, "table.step_ms")
    times = [
        _line(row, _MS, _MAX_COLUMNS, source, f"table.step_ms[{i}]") for i, row in enumerate(rows)
    ]
    try:
        form = TableForm(
            decodes=tuple(map(int, decodes)),
            prefill_tokens=tuple(map(int, columns)),
            times_ns=tuple(tuple(map(ms_to_ns, row)) for row in times),
        )
    except ValueError as error:
        raise InputError(f"{source}: table: {error}") from error
    return form, read_origin(table.get("from"), source, "table")


def _line(value: object, rule: NumberRule, most: int, source: str, path: str) -> list[float]:
    items = _list(value, most, source, path)
    return [read_number(item, rule, source, f"{path}[{i}]") for i, item in enumerate(items)]


def _list(value: object, most: int, source: str, path: str) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise InputError(f"{source}: {path}: must be a list of 1 to {most}")
    return value
