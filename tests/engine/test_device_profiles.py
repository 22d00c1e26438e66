"""Device profiles: what is shipped, and every way in which a file can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from goodput_core.errors import InputError
from goodput_core.steptime import StepShape
from goodput_engine.device.load import list_profiles, load_profile
from goodput_engine.device.profile import Overlap

_FOLDER = Path(__file__).parents[2] / "engine" / "goodput_engine" / "device" / "profiles"


def _unit() -> dict[str, Any]:
    value = yaml.safe_load((_FOLDER / "unit.yaml").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def _write(tmp_path: Path, value: object) -> str:
    path = tmp_path / "device.yaml"
    path.write_text(yaml.safe_dump(value), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", list_profiles())
def test_a_shipped_profile_loads_and_every_number_says_where_it_comes_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    raw = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert set(profile.provenance) == set(raw["numbers"])
    assert all(profile.provenance.values())


def test_the_h100_profile_is_the_arithmetic_it_shows() -> None:
    profile = load_profile("llama-3-8b-h100")
    assert profile.kv_bytes_per_token == 32 * 8 * 128 * 2 * 2
    assert profile.kv_blocks == int((80e9 * 0.9 - 16.06e9) / profile.kv_bytes_per_token / 16)
    one = StepShape.of(decodes=1, decode_context_tokens=1)
    assert profile.form.step_ns(one) == pytest.approx(16.06e9 / (3.35e12 * 0.8) * 1e9, rel=0.002)
    chunk = StepShape.of(chunks=[(0, 2048)])
    assert profile.form.step_ns(chunk) == pytest.approx(
        (2 * 8.03e9 / (989e12 * 0.55) + 131_072 / (3.35e12 * 0.8)) * 2048 * 1e9, rel=0.002
    )
    assert profile.overlap is Overlap.MAX
    assert profile.default_depth == 1


def test_a_users_own_profile_is_read_by_its_path(tmp_path: Path) -> None:
    value = _unit()
    value["numbers"]["chunk_tokens"] = {"value": 512, "from": "a test"}
    profile = load_profile(_write(tmp_path, value))
    two = StepShape.of(chunks=[(0, 513)])
    assert profile.form.step_ns(two) == 2_000_000
    assert profile.default_depth == 0


def test_an_unknown_name_lists_the_profiles() -> None:
    with pytest.raises(InputError, match=r"'gpu'; there are llama-3-8b-h100, .*unit, or give"):
        load_profile("gpu")


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["form"], "linear", "form: must be one of roofline, unit"),
        (["overlap"], None, "overlap: must be one of add, max"),
        (["name"], 3, "name: must be text"),
        (["descripton"], "x", "descripton: unknown field; did you mean description?"),
        (["numbers"], [], "numbers: must be a mapping"),
        (["numbers", "kv_block"], 1, "numbers.kv_block: unknown field; did you mean kv_blocks?"),
        (["numbers", "unit_ms"], 1, "numbers.unit_ms: must be written {value: NUMBER, from:"),
        (["numbers", "unit_ms"], {"value": 1, "from": " "}, "numbers.unit_ms.from: must say"),
        (["numbers", "unit_ms"], {"value": "1", "from": "x"}, "unit_ms.value: must be a number"),
        (["numbers", "unit_ms"], {"value": True, "from": "x"}, "unit_ms.value: must be a number"),
        (["numbers", "unit_ms"], {"value": float("nan"), "from": "x"}, "must lie in 0.001 to"),
        (["numbers", "unit_ms"], {"value": -1, "from": "x"}, "not -1"),
        (["numbers", "kv_blocks"], {"value": 1.5, "from": "x"}, "must be a whole number"),
        (["numbers", "kv_blocks"], {"value": 10**400, "from": "x"}, "must lie in 1 to 1e+08"),
        (["numbers", "c0_ms"], {"value": 1, "from": "x"}, "numbers.c0_ms: unknown field"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_field(
    tmp_path: Path, path: list[str], value: object, sentence: str
) -> None:
    profile = _unit()
    place = profile
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = _write(tmp_path, profile)
    with pytest.raises(InputError) as caught:
        load_profile(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_number_is_named_with_how_to_write_it(tmp_path: Path) -> None:
    profile = _unit()
    del profile["numbers"]["kv_blocks"]
    with pytest.raises(InputError, match=r"numbers\.kv_blocks: is required by form unit"):
        load_profile(_write(tmp_path, profile))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"name: [", "line 1: not YAML"),
        (b"", "the profile: must be a mapping"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"[" * 5000, "not YAML"),
        (b"#" * 70_000, "has at most 65536 bytes"),
        (b"a: " + b"9" * 9000, "not YAML"),
    ],
    ids=["broken", "empty", "binary", "deep", "large", "huge number"],
)
def test_a_file_that_is_no_profile_is_refused_in_one_sentence(
    tmp_path: Path, data: bytes, sentence: str
) -> None:
    path = tmp_path / "device.yaml"
    path.write_bytes(data)
    with pytest.raises(InputError, match=sentence):
        load_profile(str(path))


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_profile(str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="a device profile is a file"):
        load_profile(f"{tmp_path}/")
