"""Reading of device profiles: the shipped ones by name, others by path.

A profile is small, flat YAML in which every number has its origin. It is external input, so its
size is bounded and its keys are checked. An error message starts with the file and the field. The
form of a profile determines its numbers and the law that they define.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

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
from goodput_engine.device.profile import DeviceProfile, Overlap

__all__ = ["FORMS", "FormRules", "list_profiles", "load_profile"]

_MAX_BYTES: Final = 64 * 1024
_GB: Final = 1_000_000_000
_SUFFIXES: Final = (".yaml", ".yml")
_MAX_TEXT: Final = 2_000
_MAX_ROWS: Final = 64
_MAX_COLUMNS: Final = 256


@dataclass(frozen=True, slots=True)
class NumberRule:
    """Bounds of one number, inclusive."""

    low: float
    high: float
    whole: bool = False
    required: bool = True


_MS: Final = NumberRule(0, 100_000)
_US: Final = NumberRule(0, 1_000_000)
_NS: Final = NumberRule(0, 1_000_000_000)
_COUNT: Final = NumberRule(0, 100_000_000, whole=True)
_COMMON: Final = {
    "host_ms_per_step": NumberRule(0, 10_000),
    "host_us_per_request": NumberRule(0, 1_000_000),
    "kv_blocks": NumberRule(1, 100_000_000, whole=True),
    "block_size": NumberRule(1, 65_536, whole=True),
    "kv_bytes_per_token": NumberRule(1, 100_000_000, whole=True),
    "max_model_tokens": NumberRule(2, 100_000_000, whole=True),
    "vocab_size": NumberRule(1, 10_000_000, whole=True),
    "tensor_parallel": NumberRule(1, 1_024, whole=True),
    "pipeline_parallel": NumberRule(1, 64, whole=True, required=False),
    "handover_us_per_token": NumberRule(0, 1_000_000, required=False),
    "swap_gb_per_s": NumberRule(0.001, 100_000),
    "link_gb_per_s": NumberRule(0.001, 100_000),
    "startup_seconds": NumberRule(0, 86_400),
}


@dataclass(frozen=True, slots=True)
class FormRules:
    """The numbers of one form in a profile.

    Args:
        numbers: rules of the form's own numbers, in addition to those of every profile.
        build: builds the law from the numbers; None for a form that is written as a table.
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


def list_profiles() -> list[str]:
    """Return the names of the shipped profiles, sorted."""
    folder = resources.files("goodput_engine.device").joinpath("profiles")
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_profile(name_or_path: str) -> DeviceProfile:
    """Load a shipped profile by name, or a file by path.

    An argument with a slash, or ending in .yaml or .yml, is a path.

    Raises:
        InputError: the profile or file does not exist, or a field is invalid.
    """
    if "/" in name_or_path or name_or_path.endswith(_SUFFIXES):
        return _parse(_read(Path(name_or_path)), name_or_path)
    names = list_profiles()
    if name_or_path not in names:
        raise InputError(
            f"no device profile is called {name_or_path!r}; there are {', '.join(names)}, "
            "or give the path of a profile's YAML"
        )
    folder = resources.files("goodput_engine.device").joinpath("profiles")
    return _parse(folder.joinpath(f"{name_or_path}.yaml").read_bytes(), f"{name_or_path}.yaml")


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: a device profile is a file")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{path}: the device profile cannot be read: {error.strerror or error}"
        ) from error
    if len(data) > _MAX_BYTES:
        raise InputError(f"{path}: a device profile has at most {_MAX_BYTES} bytes")
    return data


def _parse(data: bytes, source: str) -> DeviceProfile:
    try:
        value = yaml.safe_load(data)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise InputError(f"{source}: {where}not YAML: {problem}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not YAML that can be read: {error}") from error
    top = _read_mapping(value, source, "the profile")
    form_name = _read_choice(top, "form", list(FORMS), source)
    rules = FORMS[form_name]
    keys = ["name", "description", "illustrative", "form", "overlap", "numbers"]
    _read_known(top, [*keys, "table"] if rules.build is None else keys, source, "")
    overlap = Overlap(_read_choice(top, "overlap", [o.value for o in Overlap], source))
    numbers, provenance = _numbers(
        top.get("numbers"), {**rules.numbers, **_COMMON}, form_name, source
    )
    if numbers.get("pipeline_parallel", 1) > 1 and "handover_us_per_token" not in numbers:
        raise InputError(
            f"{source}: numbers.handover_us_per_token: is required by pipeline_parallel; write "
            "handover_us_per_token: {value: …, from: …}"
        )
    form: DeviceForm
    if rules.build is None:
        form, provenance["table"] = _read_table(top.get("table"), source)
    else:
        form = rules.build(numbers)
    return DeviceProfile(
        name=_read_text(top, "name", source),
        description=_read_text(top, "description", source),
        illustrative=_read_flag(top, "illustrative", source),
        form_name=form_name,
        form=form,
        overlap=overlap,
        host_ns_per_step=ms_to_ns(numbers["host_ms_per_step"]),
        host_ns_per_request=round(numbers["host_us_per_request"] * NS_PER_US),
        kv_blocks=int(numbers["kv_blocks"]),
        block_size=int(numbers["block_size"]),
        kv_bytes_per_token=int(numbers["kv_bytes_per_token"]),
        max_model_tokens=int(numbers["max_model_tokens"]),
        vocab_size=int(numbers["vocab_size"]),
        tensor_parallel=int(numbers["tensor_parallel"]),
        pipeline_parallel=int(numbers.get("pipeline_parallel", 1)),
        handover_ns_per_token=numbers.get("handover_us_per_token", 0) * NS_PER_US,
        swap_bytes_per_s=round(numbers["swap_gb_per_s"] * _GB),
        link_bytes_per_s=round(numbers["link_gb_per_s"] * _GB),
        startup_seconds=numbers["startup_seconds"],
        numbers=numbers,
        provenance=provenance,
    )


def _numbers(
    value: object, rules: Mapping[str, NumberRule], form_name: str, source: str
) -> tuple[dict[str, float], dict[str, str]]:
    """Return every number of the file, and the origin of each."""
    given = _read_mapping(value, source, "numbers")
    _read_known(given, list(rules), source, "numbers.")
    numbers: dict[str, float] = {}
    provenance: dict[str, str] = {}
    for key, rule in rules.items():
        path = f"numbers.{key}"
        if key in given:
            written = given[key]
            if not isinstance(written, dict) or set(written) != {"value", "from"}:
                raise InputError(
                    f"{source}: {path}: must be written {{value: NUMBER, from: WHERE FROM}}"
                )
            provenance[key] = _read_origin(written["from"], source, path)
            numbers[key] = _read_number(written["value"], rule, source, f"{path}.value")
        elif rule.required:
            raise InputError(
                f"{source}: {path}: is required by form {form_name}; write "
                f"{key}: {{value: …, from: …}}"
            )
    return numbers, provenance


# --- fields ------------------------------------------------------------------------------------
def _read_table(value: object, source: str) -> tuple[TableForm, str]:
    """Return the `table` of a profile and its origin.

    Raises:
        InputError: a field is invalid.
    """
    table = _read_mapping(value, source, "table")
    _read_known(table, ["decodes", "prefill_tokens", "step_ms", "from"], source, "table.")
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
    return form, _read_origin(table.get("from"), source, "table")


def _line(value: object, rule: NumberRule, most: int, source: str, path: str) -> list[float]:
    items = _list(value, most, source, path)
    return [_read_number(item, rule, source, f"{path}[{i}]") for i, item in enumerate(items)]


def _list(value: object, most: int, source: str, path: str) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise InputError(f"{source}: {path}: must be a list of 1 to {most}")
    return value


def _read_mapping(value: object, source: str, what: str) -> dict[Any, Any]:
    """Return a mapping.

    Raises:
        InputError: the value is of another type.
    """
    if not isinstance(value, dict):
        raise InputError(f"{source}: {what}: must be a mapping")
    return value


def _read_known(given: dict[Any, Any], known: list[str], source: str, prefix: str) -> None:
    """Check the keys.

    Raises:
        InputError: a key is unknown.
    """
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key)[:100], known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"fields are {', '.join(known)}"
            raise InputError(f"{source}: {prefix}{str(key)[:100]}: unknown field; {hint}")


def _read_text(top: dict[Any, Any], key: str, source: str) -> str:
    """Return a text.

    Raises:
        InputError: the value is not a text, is empty or is too long.
    """
    value = top.get(key)
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_TEXT:
        raise InputError(f"{source}: {key}: must be text of 1 to {_MAX_TEXT} characters")
    return value.strip()


def _read_choice(top: dict[Any, Any], key: str, allowed: list[str], source: str) -> str:
    """Return one of the allowed words.

    Raises:
        InputError: the value is not one of them.
    """
    value = top.get(key)
    if value not in allowed:
        raise InputError(f"{source}: {key}: must be one of {', '.join(allowed)}")
    return str(value)


def _read_flag(top: dict[Any, Any], key: str, source: str) -> bool:
    """Return a boolean, false if absent.

    Raises:
        InputError: the value is not a boolean.
    """
    value = top.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{source}: {key}: must be true or false")
    return value


def _read_origin(value: object, source: str, path: str) -> str:
    """Return the origin of a number or a table.

    Raises:
        InputError: the origin is missing, or is too long.
    """
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_TEXT:
        raise InputError(
            f"{source}: {path}.from: must say in 1 to {_MAX_TEXT} characters where it comes from"
        )
    return value.strip()


def _read_number(value: object, rule: NumberRule, source: str, path: str) -> float:
    """Return a number within its bounds.

    Raises:
        InputError: the value is not a number, or is out of bounds.
    """
    kinds = int if rule.whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        what = "a whole number" if rule.whole else "a number"
        raise InputError(f"{source}: {path}: must be {what}, not {str(value)[:60]!r}")
    if not rule.low <= value <= rule.high:
        raise InputError(
            f"{source}: {path}: must lie in {rule.low:g} to {rule.high:g}, not {str(value)[:60]}"
        )
    return value
