"""The JSON Schema of `goodput schema` accepts and rejects the manifests that the decoder does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.core.invalid_manifests import BASE, CASES, changed

if TYPE_CHECKING:
    from collections.abc import Callable

from goodput_core.dispatch import run_command
from goodput_core.errors import SpecError
from goodput_core.spec.choices import Policy
from goodput_core.spec.llmservice import LLMService
from goodput_core.spec.schema import json_schema

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json_schema()
COMMITTED = ROOT / "examples" / "llmservice.schema.json"
# Rejected by rules between fields, by uniqueness in a list, or by parsing: JSON Schema has none.
BEYOND_THE_SCHEMA = re.compile(
    r"above|outside|lies|already used|either|exactly one|not a class|not before|begins with"
    r"|not one of volumes|0%|100%|0.0%|characters; 1 to|too large|text of|without the segments"
    r"|with kind|kind Goodput|by the preset|begin with an option|runtime kind|spec.engine.runtime"
    r"|vLLM rejects|baseline is Recorded|is Recorded, but|with endpoint chat|with prompt tokens"
    r"|flash-attn needs"
)


def valid(schema: dict[str, Any], value: Any) -> bool:
    """Evaluate the keywords that the schema uses; an unknown keyword is an error."""
    checks: dict[str, Callable[[Any], bool]] = {
        "const": lambda wanted: value == wanted,
        "enum": lambda words: value in words,
        "anyOf": lambda options: any(valid(one, value) for one in options),
        "type": lambda name: {
            "object": isinstance(value, dict),
            "array": isinstance(value, list),
            "string": isinstance(value, str),
            "boolean": isinstance(value, bool),
            "integer": isinstance(value, int) and not isinstance(value, bool),
            "number": isinstance(value, int | float) and not isinstance(value, bool),
        }[name],
        "required": lambda names: all(value.get(name) is not None for name in names),
        "properties": lambda fields: all(
            valid(fields[k], v) for k, v in value.items() if k in fields and v is not None
        ),
        "additionalProperties": lambda rest: all(
            rest is not False and valid(rest, v)
            for k, v in value.items()
            if k not in schema.get("properties", {})
        ),
        "items": lambda item: all(valid(item, one) for one in value),
        "maxProperties": lambda most: len(value) <= most,
        "maxItems": lambda most: len(value) <= most,
        "minItems": lambda least: len(value) >= least,
        "maxLength": lambda most: len(value) <= most,
        "minLength": lambda least: len(value) >= least,
        "pattern": lambda regex: re.fullmatch(regex, value) is not None,
        "minimum": lambda least: value >= least,
        "maximum": lambda most: value <= most,
        "default": lambda _: True,
        "description": lambda _: True,
        "title": lambda _: True,
        "$schema": lambda _: True,
    }
    kind = schema.get("type")
    if kind is not None and not checks["type"](kind):
        return False
    return all(checks[keyword](bound) for keyword, bound in schema.items())


@pytest.mark.golden
def test_the_committed_schema_is_generated(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    written = tmp_path / "schema.json"
    assert run_command(["schema", "-o", str(written)]) == 0
    if request.config.getoption("--rewrite-golden"):
        COMMITTED.write_bytes(written.read_bytes())
    assert COMMITTED.read_bytes() == written.read_bytes(), "rewrite it with `make golden`"


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == SCHEMA
    assert printed["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_a_file_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["schema", "-o", str(tmp_path / "missing" / "s.json")]) == 64
    assert "the schema cannot be written" in capsys.readouterr().err


def test_fields_have_descriptions_bounds_and_defaults() -> None:
    engine = SCHEMA["properties"]["spec"]["properties"]["engine"]["properties"]
    assert engine["policy"]["enum"] == [policy.value for policy in Policy]
    assert engine["policy"]["default"] == "slo"
    assert engine["tensorParallel"] == {
        "description": "Number of devices that compute each layer of the model together. From 1 to "
        "64. Defaults to 1.",
        "type": "integer",
        "minimum": 1,
        "maximum": 64,
        "default": 1,
    }
    quantity = engine["resources"]["properties"]["limits"]["additionalProperties"]
    assert quantity["anyOf"][0] == {"type": "integer", "minimum": 0}
    assert valid(quantity, "16Gi")
    assert not valid(quantity, "much")


def test_no_kubernetes_extension_is_left_in_it() -> None:
    assert "x-kubernetes" not in json.dumps(SCHEMA)


def test_the_pod_section_is_an_allow_list() -> None:
    pod = SCHEMA["properties"]["spec"]["properties"]["engine"]["properties"]["pod"]
    assert pod["additionalProperties"] is False
    assert not valid(pod, {"hostNetwork": True})


VALID = list(
    yaml.safe_load_all((ROOT / "tests/core/valid_manifests.yaml").read_text(encoding="utf-8"))
)


@pytest.mark.parametrize("manifest", VALID, ids=lambda one: one["metadata"]["name"])
def test_a_valid_manifest_fits_the_schema(manifest: dict[str, Any]) -> None:
    assert valid(SCHEMA, manifest)


def test_the_status_of_a_manifest_from_a_cluster_is_ignored() -> None:
    assert valid(SCHEMA, BASE)
    assert valid(SCHEMA, {**BASE, "status": {"replicas": 2}})


IN_JSON = [case for case in CASES if case.get("server") != "never"]


@pytest.mark.parametrize("case", IN_JSON, ids=lambda case: case["name"])
def test_an_invalid_manifest_does_not_fit_the_schema(case: dict[str, Any]) -> None:
    manifest = changed(case)
    if valid(SCHEMA, manifest):
        with pytest.raises(SpecError, match=BEYOND_THE_SCHEMA):
            LLMService.from_dict(manifest)
