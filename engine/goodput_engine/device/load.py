"""Load device profiles: shipped profiles by name, others by path.

A profile is a small YAML file that states the origin of every number. The structs of this module
declare its fields and their bounds, and msgspec decodes it. The `form` of a profile determines
which numbers it must have. An error names the file and the path of the field.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import yaml
from msgspec import Meta

from goodput_core.errors import InputError, did_you_mean
from goodput_core.spec.profiles import is_profile_path, read_profile_file, require_shipped
from goodput_core.steptime import (
    DeviceForm,
    DistServeForm,
    LinearTime,
    PiecewiseForm,
    RooflineForm,
    TableForm,
    UnitForm,
)
from goodput_core.units import NS_PER_MS, NS_PER_US, ms_to_ns
from goodput_engine.device.profile import DeviceProfile, Overlap

__all__ = ["COMMON_NUMBERS", "list_profiles", "load_profile"]

_GB: Final = 1_000_000_000

# Numbers are unions, because `float` alone would turn 6 into 6.0 wherever the number is printed.
_MS: Final = Meta(ge=0, le=100_000)
_US: Final = Meta(ge=0, le=1_000_000)
_NS: Final = Meta(ge=0, le=1_000_000_000)
_S: Final = Meta(ge=0, le=100_000)
Ms = Annotated[int, _MS] | Annotated[float, _MS]
Us = Annotated[int, _US] | Annotated[float, _US]
Ns = Annotated[int, _NS] | Annotated[float, _NS]
Seconds = Annotated[int, _S] | Annotated[float, _S]
Positive = Annotated[int, Meta(ge=1, le=1_000_000)] | Annotated[float, Meta(ge=0.001, le=1_000_000)]
Count = Annotated[int, Meta(ge=1, le=100_000_000)]
Tokens = Annotated[int, Meta(ge=0, le=100_000_000)]
Text = Annotated[str, Meta(max_length=2_000, pattern=r"\S")]

S = TypeVar("S", bound=msgspec.Struct)


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the parts of a profile's file."""


class _Number(_Struct, frozen=True, kw_only=True):
    value: int | float
    origin: Text = msgspec.field(name="from")


class _Table(_Struct, frozen=True, kw_only=True):
    """Step times: a row for each of `decodes`, a column for each of `prefill_tokens`."""

    origin: Text = msgspec.field(name="from")
    decodes: Annotated[list[Tokens], Meta(min_length=1, max_length=64)]
    prefill_tokens: Annotated[list[Tokens], Meta(min_length=1, max_length=256)]
    step_ms: Annotated[
        list[Annotated[list[Ms], Meta(max_length=256)]], Meta(min_length=1, max_length=64)
    ]


class _TimeCurve(_Struct, frozen=True, kw_only=True):
    """Step times at numbers of tokens."""

    origin: Text = msgspec.field(name="from")
    tokens: Annotated[list[Count], Meta(min_length=2, max_length=256)]
    step_ms: Annotated[list[Ms], Meta(min_length=2, max_length=256)]


class _ProfileFile(_Struct, frozen=True, kw_only=True):
    """The content of a profile's file before its numbers are checked."""

    name: Text
    description: Text
    illustrative: bool = False
    form: str
    overlap: Overlap
    table: _Table | None = None
    curve: _TimeCurve | None = None
    numbers: dict[str, object]


class _Numbers(_Struct, frozen=True, kw_only=True):
    """The numbers that every profile has; see `DeviceProfile`."""

    host_ms_per_step: Ms
    host_us_per_request: Us
    kv_blocks: Count
    block_size: Annotated[int, Meta(ge=1, le=65_536)]
    kv_bytes_per_token: Count
    max_model_tokens: Annotated[int, Meta(ge=2, le=100_000_000)]
    vocab_size: Annotated[int, Meta(ge=1, le=10_000_000)]
    tensor_parallel: Annotated[int, Meta(ge=1, le=1_024)]
    pipeline_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    handover_us_per_token: Us | None = None
    swap_gb_per_s: Positive
    link_gb_per_s: Positive
    startup_seconds: Seconds


COMMON_NUMBERS: Final = _Numbers.__struct_fields__
"""Names of the numbers that every profile has."""


class _Roofline(_Numbers, frozen=True, kw_only=True):
    c0_ms: Ms
    c1_us_per_token: Us
    c2_ns_per_context_token: Ns
    c4_us_per_request: Us


class _Piecewise(_Numbers, frozen=True, kw_only=True):
    c2_ns_per_context_token: Ns
    c3_ns_per_square: Ns
    c4_us_per_request: Us


class _DistServe(_Numbers, frozen=True, kw_only=True):
    prefill_fixed_ms: Ms
    prefill_us_per_token: Us
    prefill_ns_per_square: Ns
    decode_small_fixed_ms: Ms
    decode_small_ns_per_context_token: Ns
    decode_small_us_per_request: Us
    decode_large_fixed_ms: Ms
    decode_large_ns_per_context_token: Ns
    decode_large_us_per_request: Us
    decode_large_from_requests: Count


class _Unit(_Numbers, frozen=True, kw_only=True):
    unit_ms: Positive
    chunk_tokens: Count | None = None


_FORMS: Final[dict[str, type[_Numbers]]] = {
    "roofline": _Roofline,
    "distserve": _DistServe,
    "table": _Numbers,
    "piecewise": _Piecewise,
    "unit": _Unit,
}
"""Structs of a profile's numbers by the profile's form."""
_REMEDIES: Final = {
    "overlap": f"; it must be one of {', '.join(Overlap)}",
    "numbers": "; a number is written NAME: {value: NUMBER, from: ORIGIN}",
}
"""Remedies that are added to errors, by the first name in the path of the invalid field."""


def list_profiles() -> list[str]:
    """Return the names of the shipped profiles, sorted."""
    folder = resources.files("goodput_engine.device").joinpath("profiles")
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_profile(name_or_path: str) -> DeviceProfile:
    """Load a profile by its shipped name or by its path.

    An argument with a slash, or ending in .yaml or .yml, is a path.

    Raises:
        InputError: the profile or file does not exist, or a field is invalid.
    """
    if is_profile_path(name_or_path):
        return _parse(read_profile_file(Path(name_or_path)), name_or_path)
    require_shipped(name_or_path)
    folder = resources.files("goodput_engine.device").joinpath("profiles")
    return _parse(folder.joinpath(f"{name_or_path}.yaml").read_bytes(), f"{name_or_path}.yaml")


def _parse(data: bytes, source: str) -> DeviceProfile:
    try:
        value = yaml.safe_load(data)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise InputError(f"{source}: {where}not YAML: {problem}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: cannot be read as YAML: {error}") from error
    try:
        return _build(value, source)
    except ValueError as error:
        part = "table" if isinstance(value, dict) and value.get("form") == "table" else "curve"
        raise InputError(f"{source}: {part}: {error}") from error


def _build(value: object, source: str) -> DeviceProfile:
    file = _convert(value, _ProfileFile, source)
    if file.form not in _FORMS:
        raise InputError(f"{source}: form: must be one of {', '.join(_FORMS)}")
    if (file.table is not None) != (file.form == "table"):
        raise InputError(f"{source}: table: is required by form table and by no other form")
    if (file.curve is not None) != (file.form == "piecewise"):
        raise InputError(f"{source}: curve: is required by form piecewise and by no other form")
    file_numbers = {
        name: _convert(number, _Number, source, f"numbers.{name}.")
        for name, number in file.numbers.items()
    }
    values = {name: number.value for name, number in file_numbers.items()}
    kind = _FORMS[file.form]
    numbers = _convert(values, kind, source, "numbers.")
    if numbers.pipeline_parallel > 1 and numbers.handover_us_per_token is None:
        raise InputError(
            f"{source}: numbers.handover_us_per_token: is required by pipeline_parallel; write "
            "handover_us_per_token: {value: …, from: …}"
        )
    form_names = [name for name in kind.__struct_fields__ if name not in COMMON_NUMBERS]
    names = [name for name in (*form_names, *COMMON_NUMBERS) if name in values]
    provenance = {name: file_numbers[name].origin.strip() for name in names}
    if file.table is not None:
        provenance["table"] = file.table.origin.strip()
    if file.curve is not None:
        provenance["curve"] = file.curve.origin.strip()
    return DeviceProfile(
        name=file.name.strip(),
        description=file.description.strip(),
        illustrative=file.illustrative,
        form_name=file.form,
        form=_build_form(numbers, file.table, file.curve),
        overlap=file.overlap,
        host_ns_per_step=ms_to_ns(numbers.host_ms_per_step),
        host_ns_per_request=round(numbers.host_us_per_request * NS_PER_US),
        kv_blocks=numbers.kv_blocks,
        block_size=numbers.block_size,
        kv_bytes_per_token=numbers.kv_bytes_per_token,
        max_model_tokens=numbers.max_model_tokens,
        vocab_size=numbers.vocab_size,
        tensor_parallel=numbers.tensor_parallel,
        pipeline_parallel=numbers.pipeline_parallel,
        handover_ns_per_token=(numbers.handover_us_per_token or 0) * NS_PER_US,
        swap_bytes_per_s=round(numbers.swap_gb_per_s * _GB),
        link_bytes_per_s=round(numbers.link_gb_per_s * _GB),
        startup_seconds=numbers.startup_seconds,
        numbers={name: values[name] for name in names},
        provenance=provenance,
    )


def _build_form(numbers: _Numbers, table: _Table | None, curve: _TimeCurve | None) -> DeviceForm:
    """Build the step-time law.

    Raises:
        ValueError: the table breaks a rule of `TableForm`, or the curve one of `PiecewiseForm`.
    """
    match numbers:
        case _Roofline():
            return RooflineForm(
                c0_ns=numbers.c0_ms * NS_PER_MS,
                c1_ns_per_token=numbers.c1_us_per_token * NS_PER_US,
                c2_ns_per_context_token=numbers.c2_ns_per_context_token,
                c4_ns_per_request=numbers.c4_us_per_request * NS_PER_US,
            )
        case _Piecewise():
            assert curve is not None
            return PiecewiseForm(
                tokens=tuple(curve.tokens),
                times_ns=tuple(time_ms * NS_PER_MS for time_ms in curve.step_ms),
                c2_ns_per_context_token=numbers.c2_ns_per_context_token,
                c3_ns_per_square=numbers.c3_ns_per_square,
                c4_ns_per_request=numbers.c4_us_per_request * NS_PER_US,
            )
        case _DistServe():
            return DistServeForm(
                prefill_fixed_ns=numbers.prefill_fixed_ms * NS_PER_MS,
                prefill_ns_per_token=numbers.prefill_us_per_token * NS_PER_US,
                prefill_ns_per_square=numbers.prefill_ns_per_square,
                small=LinearTime(
                    fixed_ns=numbers.decode_small_fixed_ms * NS_PER_MS,
                    ns_per_context_token=numbers.decode_small_ns_per_context_token,
                    ns_per_request=numbers.decode_small_us_per_request * NS_PER_US,
                ),
                large=LinearTime(
                    fixed_ns=numbers.decode_large_fixed_ms * NS_PER_MS,
                    ns_per_context_token=numbers.decode_large_ns_per_context_token,
                    ns_per_request=numbers.decode_large_us_per_request * NS_PER_US,
                ),
                large_from_requests=numbers.decode_large_from_requests,
            )
        case _Unit():
            return UnitForm(unit_ns=ms_to_ns(numbers.unit_ms), chunk_tokens=numbers.chunk_tokens)
    assert table is not None
    return TableForm(
        decodes=tuple(table.decodes),
        prefill_tokens=tuple(table.prefill_tokens),
        times_ns=tuple(tuple(map(ms_to_ns, row)) for row in table.step_ms),
    )


def _convert(value: object, kind: type[S], source: str, prefix: str = "") -> S:
    """Decode a part of a profile.

    Raises:
        InputError: a field is missing, unknown or invalid.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, place = " ".join(str(error).split()).partition(" - at ")
        path = prefix + place.strip("`").removeprefix("$").removeprefix(".")
        remedy = _REMEDIES.get(path.partition(".")[0], "")
        parts: dict[str, type[msgspec.Struct]] = {
            prefix: kind,
            "table": _Table,
            "curve": _TimeCurve,
        }
        if path in parts and (unknown := re.search(r"unknown field `(.+)`", problem)):
            fields = parts[path].__struct_encode_fields__
            remedy = did_you_mean(unknown[1], fields) or f"; fields are {', '.join(fields)}"
        path = path.removesuffix(".") or "the profile"
        raise InputError(f"{source}: {path}: {problem[0].lower()}{problem[1:]}{remedy}") from error
