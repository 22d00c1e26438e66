"""Device profiles: what is shipped, and every way in which a file can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from goodput_core.errors import InputError
from goodput_core.steptime import StepShape, largest_prefill
from goodput_core.units import NS_PER_MS
from goodput_engine.device.load import list_profiles, load_profile
from goodput_engine.device.profile import Overlap

_FOLDER = Path(__file__).parents[3] / "engine" / "goodput_engine" / "device" / "profiles"


def _raw(name: str) -> dict[str, Any]:
    value = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def _unit() -> dict[str, Any]:
    return _raw("unit")


def _write(tmp_path: Path, value: object) -> str:
    path = tmp_path / "device.yaml"
    path.write_text(yaml.safe_dump(value), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", list_profiles())
def test_a_shipped_profile_loads_and_every_number_says_where_it_comes_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    raw = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert set(profile.numbers) == set(raw["numbers"])
    assert set(profile.provenance) == set(raw["numbers"]) | (set(raw) & {"table"})
    assert all(profile.provenance.values())


@pytest.mark.parametrize(
    ("name", "memory", "bandwidth", "stages", "devices", "parameters", "kv_bytes"),
    [
        ("llama-3-8b-h100", 80e9, 3.35e12, 1, 1, 8.03e9, 32 * 8 * 128 * 2 * 2),
        ("llama-3-8b-h200", 141e9, 4.8e12, 1, 1, 8.03e9, 32 * 8 * 128 * 2 * 2),
        ("llama-3-70b-4xh100", 80e9, 3.35e12, 1, 4, 70.55e9, 80 * 8 * 128 * 2 * 2),
        ("llama-3-70b-4xh100-pp2", 80e9, 3.35e12, 2, 2, 70.55e9, 80 * 8 * 128 * 2 * 2),
    ],
)
def test_a_roofline_profile_is_the_arithmetic_it_shows(
    name: str,
    memory: float,
    bandwidth: float,
    stages: int,
    devices: int,
    parameters: float,
    kv_bytes: int,
) -> None:
    profile = load_profile(name)
    read_per_s = devices * bandwidth * 0.8
    weights = 2 * parameters
    # Two all-reduces in each of 80 layers, for nothing and for each token of 8,192 numbers.
    reduces, ring = 160 if devices > 1 else 0, 2 * (devices - 1) / devices
    reduce_ns, reduce_ns_per_token = reduces * 10e3, reduces * ring * 8192 * 2 / 360e9 * 1e9
    assert (profile.tensor_parallel, profile.pipeline_parallel) == (devices, stages)
    assert profile.kv_bytes_per_token == kv_bytes
    assert profile.kv_blocks == int((profile.devices * memory * 0.9 - weights) / kv_bytes / 16)
    one = StepShape.of(decodes=1, decode_context_tokens=1)
    assert profile.form.step_ns(one) == pytest.approx(
        weights / read_per_s * 1e9 + reduce_ns, rel=0.002
    )
    chunk = StepShape.of(chunks=[(0, 2048)])
    per_token_s = 2 * parameters / (devices * 989e12 * 0.55) + kv_bytes / read_per_s
    assert profile.form.step_ns(chunk) == pytest.approx(
        (per_token_s * 1e9 + reduce_ns_per_token) * 2048, rel=0.002
    )
    assert profile.overlap is Overlap.MAX
    assert profile.default_depth == stages
    if stages > 1:
        assert profile.handover_ns(10_000) == pytest.approx(10_000 * 8192 / 360e9 * 1e9, rel=0.005)


@pytest.mark.parametrize(
    ("step", "published_ms"),
    [
        (StepShape.of(chunks=[(0, 512)]), 18.1 + 0.102 * 512 + 7.12e-6 * 512**2),
        (StepShape.of(chunks=[(0, 512), (0, 9)]), 18.1 + 0.102 * 521 + 7.12e-6 * (512**2 + 81)),
        (StepShape.of(decodes=94, decode_context_tokens=9400), 19.9 + 6.27e-4 * 9400 + 0.0385 * 94),
        (StepShape.of(decodes=95, decode_context_tokens=9500), 7.17 + 5.80e-4 * 9500 + 0.158 * 95),
    ],
    ids=["prompt", "two prompts", "small batch", "large batch"],
)
def test_opt_13b_takes_the_time_that_distserve_published(
    step: StepShape, published_ms: float
) -> None:
    step_ns = load_profile("opt-13b-a100").form.step_ns(step)
    assert step_ns / NS_PER_MS == pytest.approx(published_ms, rel=0.005)


# Iteration times of a 70B model on H100: 32 decodes of 1,024 tokens of context beside a prefill.
_PUBLISHED_MS = {0: 21, 128: 72, 256: 126, 512: 237, 1024: 460}
_BESIDE = StepShape.of(decodes=32, decode_context_tokens=32 * 1024)


@pytest.mark.parametrize(("prefill", "published_ms"), _PUBLISHED_MS.items())
def test_the_published_70b_table_is_met_at_every_point(prefill: int, published_ms: float) -> None:
    step = _BESIDE.with_chunk(0, prefill) if prefill else _BESIDE
    step_ns = load_profile("published-70b-table").form.step_ns(step)
    assert step_ns / NS_PER_MS == pytest.approx(published_ms, rel=0.05)


@pytest.mark.parametrize(("multiple", "chunk"), [(1, 194), (64, 192)], ids=["exact", "floored"])
def test_a_target_of_100_ms_makes_the_published_chunk(multiple: int, chunk: int) -> None:
    profile = load_profile("published-70b-table")
    found = largest_prefill(
        profile.form,
        beside=_BESIDE,
        target_ns=100 * NS_PER_MS,
        most_tokens=2048,
        multiple=multiple,
    )
    assert found == chunk


def test_only_the_illustrative_table_says_that_it_is() -> None:
    illustrative = [name for name in list_profiles() if load_profile(name).illustrative]
    assert illustrative == ["published-70b-table"]


def test_only_the_form_table_has_a_table(tmp_path: Path) -> None:
    value = _unit()
    value["table"] = _raw("published-70b-table")["table"]
    with pytest.raises(InputError, match="table: is required by form table and by no other form"):
        load_profile(_write(tmp_path, value))


def _curve() -> dict[str, Any]:
    value = _unit()
    value["form"] = "piecewise"
    value["curve"] = {"from": "a test", "tokens": [1, 8, 32], "step_ms": [66, 100, 192]}
    del value["numbers"]["unit_ms"]
    for name in ("c2_ns_per_context_token", "c3_ns_per_square", "c4_us_per_request"):
        value["numbers"][name] = {"value": 1, "from": "a test"}
    return value


def test_a_curve_is_interpolated_and_continued(tmp_path: Path) -> None:
    profile = load_profile(_write(tmp_path, _curve()))
    assert profile.provenance["curve"] == "a test"
    for decodes, curve_ns in ((1, 66_000_000), (20, 146_000_000), (56, 284_000_000)):
        step = StepShape.of(decodes=decodes, decode_context_tokens=700)
        assert profile.form.step_ns(step) == curve_ns + 700 + decodes * 1_000
    prompt = StepShape.of(chunks=[(4, 8)])
    assert profile.form.step_ns(prompt) == 100_000_000 + (12 * 12 - 4 * 4) + 1_000


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["curve"], None, "curve: is required by form piecewise and by no other form"),
        (["form"], "unit", "curve: is required by form piecewise and by no other form"),
        (["curve", "tokens"], [8, 8, 9], "curve: tokens must increase"),
        (["curve", "step_ms"], [1, 2], "curve: at least two points are needed, each with"),
        (["curve", "step_ms"], [3, 2, 1], "curve: times must not decrease"),
        (["curve", "step_s"], [], "curve: object contains unknown field `step_s`; did you mean st"),
    ],
)
def test_an_invalid_curve_is_rejected_with_its_place(
    tmp_path: Path, path: list[str], value: object, sentence: str
) -> None:
    _assert_rejected(tmp_path, _curve(), path, value, sentence)


def test_a_users_own_profile_is_read_by_its_path(tmp_path: Path) -> None:
    value = _unit()
    value["numbers"]["chunk_tokens"] = {"value": 512, "from": "a test"}
    profile = load_profile(_write(tmp_path, value))
    two = StepShape.of(chunks=[(0, 513)])
    assert profile.form.step_ns(two) == 2_000_000
    assert profile.default_depth == 0


def test_an_unknown_name_lists_the_profiles() -> None:
    with pytest.raises(InputError, match=r"'gpu'; use one of llama-3-70b-4xh100, .*unit, or give"):
        load_profile("gpu")


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["form"], "linear", "form: must be one of roofline, distserve, table, piecewise, unit"),
        (["illustrative"], "yes", "illustrative: expected `bool`, got `str`"),
        (["table"], {}, "table: object missing required field `from`"),
        (["overlap"], None, "overlap: expected `str`, got `null`; it must be one of add, max"),
        (["name"], 3, "name: expected `str`, got `int`"),
        (["descripton"], "x", "unknown field `descripton`; did you mean description?"),
        (["numbers"], [], "numbers: expected `object`, got `array`"),
        (
            ["numbers", "kv_block"],
            {"value": 1, "from": "x"},
            "unknown field `kv_block`; did you mean",
        ),
        (["numbers", "unit_ms"], 1, "numbers.unit_ms: expected `object`, got `int`; a number is"),
        (["numbers", "unit_ms"], {"value": 1, "from": " "}, "numbers.unit_ms.from: expected `str`"),
        (["numbers", "unit_ms"], {"value": "1", "from": "x"}, "unit_ms.value: expected `int | flo"),
        (["numbers", "unit_ms"], {"value": True, "from": "x"}, "unit_ms.value: expected `int | fl"),
        (["numbers", "unit_ms"], {"value": float("nan"), "from": "x"}, "expected `float` >= 0.001"),
        (["numbers", "unit_ms"], {"value": -1, "from": "x"}, "numbers.unit_ms: expected `int` >= "),
        (["numbers", "kv_blocks"], {"value": 1.5, "from": "x"}, "expected `int`, got `float`"),
        (["numbers", "kv_blocks"], {"value": 10**400, "from": "x"}, "expected `int` <= 100000000"),
        (["numbers", "c0_ms"], {"value": 1, "from": "x"}, "numbers: object contains unknown field"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_field(
    tmp_path: Path, path: list[str], value: object, sentence: str
) -> None:
    _assert_rejected(tmp_path, _unit(), path, value, sentence)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["table"], None, "table: is required by form table and by no other form"),
        (["table", "stepms"], [], "table: object contains unknown field `stepms`; did you mean st"),
        (["table", "from"], "", "table.from: expected `str`"),
        (["table", "decodes"], 32, "table.decodes: expected `array`, got `int`"),
        (["table", "decodes"], [], "table.decodes: expected `array` of length >= 1"),
        (["table", "decodes"], [1.5], "table.decodes[0]: expected `int`, got `float`"),
        (["table", "prefill_tokens"], [*range(300)], "prefill_tokens: expected `array` of length"),
        (["table", "prefill_tokens"], [0, 9, 9, 9, 9], "table: prefill_tokens must increase"),
        (["table", "step_ms"], [[21]], "table: times must have one row for each of decodes"),
        (["table", "step_ms"], [[1, 2, 3, 4, "x"]], "table.step_ms[0][4]: expected `int | fl"),
        (["table", "step_ms"], [[9, 8, 7, 6, 5]], "table: times must not decrease"),
        (["numbers", "c0_ms"], {"value": 1, "from": "x"}, "numbers: object contains unknown field"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_place(
    tmp_path: Path, path: list[str], value: object, sentence: str
) -> None:
    _assert_rejected(tmp_path, _raw("published-70b-table"), path, value, sentence)


def _assert_rejected(
    tmp_path: Path, profile: dict[str, Any], path: list[str], value: object, sentence: str
) -> None:
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


def test_pipeline_stages_need_to_say_what_a_hand_over_takes(tmp_path: Path) -> None:
    profile = _unit()
    profile["numbers"]["pipeline_parallel"] = {"value": 4, "from": "a test"}
    with pytest.raises(InputError, match=r"numbers\.handover_us_per_token: is required by pipe"):
        load_profile(_write(tmp_path, profile))
    profile["numbers"]["handover_us_per_token"] = {"value": 1.5, "from": "a test"}
    loaded = load_profile(_write(tmp_path, profile))
    assert (loaded.devices, loaded.default_depth, loaded.handover_ns(3)) == (4, 2, 4500)


def test_a_missing_number_is_named_with_how_to_write_it(tmp_path: Path) -> None:
    profile = _unit()
    del profile["numbers"]["kv_blocks"]
    with pytest.raises(InputError, match="numbers: object missing required field `kv_blocks`; a"):
        load_profile(_write(tmp_path, profile))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"name: [", "line 1: not YAML"),
        (b"", "the profile: expected `object`, got `null`"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"[" * 5000, "cannot be read as YAML"),
        (b"#" * 70_000, "has at most 65536 bytes"),
        (b"a: " + b"9" * 9000, "cannot be read as YAML"),
    ],
    ids=["broken", "empty", "binary", "deep", "large", "huge number"],
)
def test_a_file_that_is_no_profile_is_rejected_in_one_sentence(
    tmp_path: Path, data: bytes, sentence: str
) -> None:
    path = tmp_path / "device.yaml"
    path.write_bytes(data)
    with pytest.raises(InputError, match=sentence):
        load_profile(str(path))


def test_a_path_that_is_no_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_profile(str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="is not a file; name the YAML file"):
        load_profile(f"{tmp_path}/")
