"""Reading device profiles: the shipped ones by name, a user's own by path.

A profile is small, flat YAML in which no number stands without where it comes from. It is input
from outside: bounded in size, strict in its keys, and refused in one sentence.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from goodput_core.errors import InputError
from goodput_core.steptime import RooflineForm, StepTimeForm, UnitForm
from goodput_core.units import NS_PER_MS, NS_PER_US, ms_to_ns
from goodput_engine.device.profile import DeviceProfile, Overlap

__all__ = ["list_profiles", "load_profile"]

_MAX_BYTES: Final = 64 * 1024
_MAX_TEXT: Final = 2_000
_GB: Final = 1_000_000_000
_SUFFIXES: Final = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class _Number:
    """Bounds of one number, inclusive."""

    low: float
    high: float
    whole: bool = False
    required: bool = True


_COMMON: Final = {
    "host_ms_per_step": _Number(0, 10_000),
    "host_us_per_request": _Number(0, 1_000_000),
    "kv_blocks": _Number(1, 100_000_000, whole=True),
    "block_size": _Number(1, 65_536, whole=True),
    "kv_bytes_per_token": _Number(1, 100_000_000, whole=True),
    "max_model_tokens": _Number(2, 100_000_000, whole=True),
    "vocab_size": _Number(1, 10_000_000, whole=True),
    "tensor_parallel": _Number(1, 1_024, whole=True),
    "swap_gb_per_s": _Number(0.001, 100_000),
    "link_gb_per_s": _Number(0.001, 100_000),
    "startup_seconds": _Number(0, 86_400),
}
_FORMS: Final = {
    "roofline": {
        "c0_ms": _Number(0, 100_000),
        "c1_us_per_token": _Number(0, 1_000_000),
        "c2_ns_per_context_token": _Number(0, 1_000_000_000),
        "c4_us_per_request": _Number(0, 1_000_000),
    },
    "unit": {
        "unit_ms": _Number(0.001, 1_000_000),
        "chunk_tokens": _Number(1, 100_000_000, whole=True, required=False),
    },
}


def list_profiles() -> list[str]:
    """Names of the shipped profiles, sorted."""
    folder = resources.files("goodput_engine.device").joinpath("profiles")
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_profile(name_or_path: str) -> DeviceProfile:
    """A shipped profile by its name, or a file: anything with a slash or ending in .yaml.

    Raises:
        InputError: no such profile or file, or a field that breaks a rule.
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
    top = _mapping(value, source, "the profile")
    _known(top, ["name", "description", "form", "overlap", "numbers"], source, "")
    form_name = _choice(top, "form", list(_FORMS), source)
    overlap = Overlap(_choice(top, "overlap", [o.value for o in Overlap], source))
    rules = _COMMON | _FORMS[form_name]
    given = _mapping(top.get("numbers"), source, "numbers")
    _known(given, list(rules), source, "numbers.")
    numbers: dict[str, float] = {}
    provenance: dict[str, str] = {}
    for key, rule in rules.items():
        if key in given:
            numbers[key], provenance[key] = _number(given[key], rule, source, f"numbers.{key}")
        elif rule.required:
            raise InputError(
                f"{source}: numbers.{key}: is required by form {form_name}; write "
                f"{key}: {{value: …, from: …}}"
            )
    return DeviceProfile(
        name=_text(top, "name", source),
        description=_text(top, "description", source),
        form_name=form_name,
        form=_form(form_name, numbers),
        overlap=overlap,
        host_ns_per_step=ms_to_ns(numbers["host_ms_per_step"]),
        host_ns_per_request=round(numbers["host_us_per_request"] * NS_PER_US),
        kv_blocks=int(numbers["kv_blocks"]),
        block_size=int(numbers["block_size"]),
        kv_bytes_per_token=int(numbers["kv_bytes_per_token"]),
        max_model_tokens=int(numbers["max_model_tokens"]),
        vocab_size=int(numbers["vocab_size"]),
        tensor_parallel=int(numbers["tensor_parallel"]),
        swap_bytes_per_s=round(numbers["swap_gb_per_s"] * _GB),
        link_bytes_per_s=round(numbers["link_gb_per_s"] * _GB),
        startup_seconds=numbers["startup_seconds"],
        provenance=provenance,
    )


def _form(name: str, numbers: dict[str, float]) -> StepTimeForm:
    if name == "unit":
        chunk = numbers.get("chunk_tokens")
        return UnitForm(
            unit_ns=ms_to_ns(numbers["unit_ms"]),
            chunk_tokens=None if chunk is None else int(chunk),
        )
    return RooflineForm(
        c0_ns=numbers["c0_ms"] * NS_PER_MS,
        c1_ns_per_token=numbers["c1_us_per_token"] * NS_PER_US,
        c2_ns_per_context_token=numbers["c2_ns_per_context_token"],
        c4_ns_per_request=numbers["c4_us_per_request"] * NS_PER_US,
    )


def _mapping(value: object, source: str, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{source}: {what}: must be a mapping")
    return value


def _known(given: dict[Any, Any], known: list[str], source: str, prefix: str) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key)[:100], known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"fields are {', '.join(known)}"
            raise InputError(f"{source}: {prefix}{str(key)[:100]}: unknown field; {hint}")


def _text(top: dict[Any, Any], key: str, source: str) -> str:
    value = top.get(key)
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_TEXT:
        raise InputError(f"{source}: {key}: must be text of 1 to {_MAX_TEXT} characters")
    return value.strip()


def _choice(top: dict[Any, Any], key: str, allowed: list[str], source: str) -> str:
    value = top.get(key)
    if value not in allowed:
        raise InputError(f"{source}: {key}: must be one of {', '.join(allowed)}")
    return str(value)


def _number(value: object, rule: _Number, source: str, path: str) -> tuple[float, str]:
    if not isinstance(value, dict) or set(value) != {"value", "from"}:
        raise InputError(f"{source}: {path}: must be written {{value: NUMBER, from: WHERE FROM}}")
    number, origin = value["value"], value["from"]
    if not isinstance(origin, str) or not origin.strip() or len(origin) > _MAX_TEXT:
        raise InputError(
            f"{source}: {path}.from: must say in 1 to {_MAX_TEXT} characters where it comes from"
        )
    kinds = int if rule.whole else (int, float)
    if isinstance(number, bool) or not isinstance(number, kinds):
        what = "a whole number" if rule.whole else "a number"
        raise InputError(f"{source}: {path}.value: must be {what}, not {str(number)[:60]!r}")
    if not rule.low <= number <= rule.high:
        raise InputError(
            f"{source}: {path}.value: must lie in {rule.low:g} to {rule.high:g}, "
            f"not {str(number)[:60]}"
        )
    return number, origin.strip()
