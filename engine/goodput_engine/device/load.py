"""Reading device profiles: the shipped ones by name, a user's own by path.

A profile is small, flat YAML in which no number stands without where it comes from. It is input
from outside: bounded in size, strict in its keys, and refused in one sentence.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from goodput_core.errors import InputError
from goodput_core.units import NS_PER_US, ms_to_ns
from goodput_engine.device.fields import (
    NumberRule,
    read_choice,
    read_flag,
    read_known,
    read_mapping,
    read_number,
    read_origin,
    read_text,
)
from goodput_engine.device.forms import FORMS, read_table
from goodput_engine.device.profile import DeviceProfile, Overlap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.steptime import DeviceForm

__all__ = ["list_profiles", "load_profile"]

_MAX_BYTES: Final = 64 * 1024
_GB: Final = 1_000_000_000
_SUFFIXES: Final = (".yaml", ".yml")
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
    top = read_mapping(value, source, "the profile")
    form_name = read_choice(top, "form", list(FORMS), source)
    rules = FORMS[form_name]
    keys = ["name", "description", "illustrative", "form", "overlap", "numbers"]
    read_known(top, [*keys, "table"] if rules.build is None else keys, source, "")
    overlap = Overlap(read_choice(top, "overlap", [o.value for o in Overlap], source))
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
        form, provenance["table"] = read_table(top.get("table"), source)
    else:
        form = rules.build(numbers)
    return DeviceProfile(
        name=read_text(top, "name", source),
        description=read_text(top, "description", source),
        illustrative=read_flag(top, "illustrative", source),
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
    """Every number of the file, and where each comes from."""
    given = read_mapping(value, source, "numbers")
    read_known(given, list(rules), source, "numbers.")
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
            provenance[key] = read_origin(written["from"], source, path)
            numbers[key] = read_number(written["value"], rule, source, f"{path}.value")
        elif rule.required:
            raise InputError(
                f"{source}: {path}: is required by form {form_name}; write "
                f"{key}: {{value: …, from: …}}"
            )
    return numbers, provenance
