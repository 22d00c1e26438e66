"""The CustomResourceDefinition agrees with the dataclasses, within the API server's limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from goodput_core.cli import installed_version
from goodput_core.declaration import cross_field_rules, declared_fields
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.spec.llmservice import LLMServiceSpec
from goodput_core.spec.status import LLMServiceStatus
from goodput_operator.render.crd import render_crd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.declaration import DeclaredField

CRD = render_crd()
(VERSION,) = CRD["spec"]["versions"]
ROOT = VERSION["schema"]["openAPIV3Schema"]
TEXT = yaml.safe_dump(CRD, sort_keys=False, width=100, allow_unicode=True)
COPIES = (
    Path(__file__).resolve().parents[3] / "charts/goodput/files/crd-llmservices.yaml",
    # That of an earlier version is frozen; see test_crd_compatibility.py.
    Path(__file__).with_name("released") / f"{installed_version()}.yaml",
)


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and all nested schemas with their paths."""
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    for inside in ("items", "additionalProperties"):
        if inside in schema:
            yield from nodes(schema[inside], f"{path}[]")


NODES = dict(nodes(ROOT, ""))
OURS = {path: node for path, node in NODES.items() if path.startswith((".spec", ".status"))}


def declared(cls: type[Any], path: str) -> Iterator[tuple[str, DeclaredField]]:
    for field in declared_fields(cls):
        at = f"{path}.{field.name}"
        yield at, field
        if field.nested is not None:
            yield from declared(field.nested, f"{at}[]" if field.container is tuple else at)


DECLARED = dict([*declared(LLMServiceSpec, ".spec"), *declared(LLMServiceStatus, ".status")])


@pytest.mark.golden
@pytest.mark.parametrize("path", COPIES, ids=["chart", "present version"])
def test_the_copies_of_this_definition_are_equal(
    path: Path, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--rewrite-golden"):
        path.write_text(TEXT, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == TEXT, "the dataclasses changed; see `make golden`"


def test_the_command_prints_the_definition() -> None:
    command = [sys.executable, "-m", "goodput_operator.render.crd"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout == TEXT


def test_the_definition_is_far_below_the_size_limit_of_objects() -> None:
    assert len(TEXT) < 256 * 1024


@pytest.mark.parametrize("path", sorted(DECLARED))
def test_every_field_is_in_the_schema_with_its_default_and_description(path: str) -> None:
    field, node = DECLARED[path], NODES[path]
    assert node["description"].startswith(field.rule.doc)
    parent = NODES[path.rpartition(".")[0]]
    assert (field.name in parent.get("required", [])) is field.required
    if field.nested is None and field.container is None and field.default is not None:
        assert node["default"] == field.default


def test_nothing_is_in_the_schema_that_no_field_declares() -> None:
    assert set(OURS) - set(DECLARED) == {
        ".spec",
        ".status",
        *(f"{path}[]" for path, field in DECLARED.items() if field.container and field.item != Any),
    }


@pytest.mark.parametrize("path", sorted(OURS))
def test_every_text_list_and_map_is_bounded(path: str) -> None:
    node = OURS[path]
    if node.get("type") == "string" or "x-kubernetes-int-or-string" in node:
        assert {"maxLength", "enum"} & set(node)
    elif node["type"] == "array":
        assert node["maxItems"] > 0
        assert node["x-kubernetes-list-type"] in {"map", "atomic"}
    elif node["type"] == "object" and "properties" not in node:
        assert node["maxProperties"] > 0
    elif node["type"] == "number":
        assert {"minimum", "maximum"} <= set(node)
    else:
        assert node["type"] in {"integer", "boolean", "object"}


def test_a_pattern_is_a_rule_whose_error_is_a_sentence() -> None:
    """The error of the keyword `pattern` would be the regular expression."""
    patterns = {path: field.rule for path, field in DECLARED.items() if field.rule.pattern}
    assert len(patterns) > 40
    for path, rule in patterns.items():
        node = NODES.get(f"{path}[]", NODES[path])
        first = node["x-kubernetes-validations"][0]
        assert rule.pattern is not None
        assert rule.pattern in first["rule"]
        assert first["message"] == f"must {rule.pattern_hint}"
    assert [path for path, node in NODES.items() if "pattern" in node] == []


@pytest.mark.parametrize(
    ("path", "choices"),
    [
        (".spec.engine.policy", Policy),
        (".spec.engine.preemption", Preemption),
        (".spec.router.policy", RouterPolicy),
        (".spec.control.mode", ControlMode),
    ],
    ids=str,
)
def test_a_choice_has_the_values_of_its_enum(path: str, choices: type[Policy]) -> None:
    assert NODES[path]["enum"] == [choice.value for choice in choices]


def test_every_rule_between_fields_is_a_rule_of_the_schema_at_the_same_field() -> None:
    seen = 0
    for path, field in [(".spec", None), *DECLARED.items()]:
        cls = LLMServiceSpec if field is None else field.nested
        if cls is None:
            continue
        at = f"{path}[]" if field is not None and field.container is tuple else path
        rules = NODES[at].get("x-kubernetes-validations", [])
        for between, rule in zip(cross_field_rules(cls), rules, strict=True):
            assert rule["rule"] == between.cel.rule
            assert rule.get("fieldPath", ".") == f".{between.field}"
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("name", ["classes", "imagePullSecrets", "env", "volumes", "conditions"])
def test_a_list_that_is_a_map_has_its_key(name: str) -> None:
    found = [node for path, node in OURS.items() if path.endswith(f".{name}")]
    assert found
    for node in found:
        assert node["x-kubernetes-list-type"] == "map"
        (key,) = node["x-kubernetes-list-map-keys"]
        assert key in node["items"]["required"]


def test_the_items_of_a_list_have_the_type_of_the_field() -> None:
    numbers = {p for p, f in DECLARED.items() if f.container is tuple and f.item is int}
    assert numbers == {".status.learnt.startupSeconds"}
    texts = {p for p, f in DECLARED.items() if f.container is tuple and f.item is str}
    assert texts == {".spec.engine.runtime.args"}
    kinds = dict.fromkeys(numbers, "integer") | dict.fromkeys(texts, "string")
    for path, field in DECLARED.items():
        if field.container is tuple:
            assert NODES[path]["items"]["type"] == kinds.get(path, "object")


def test_a_fractional_minimum_is_also_a_rule() -> None:
    """The API server truncates the minimum of a number if the value is whole."""
    (rule,) = NODES[".spec.engine.ageingSeconds"]["x-kubernetes-validations"]
    assert rule == {"rule": "self >= 0.001", "message": "must be at least 0.001"}


def test_only_the_name_of_the_metadata_is_validated() -> None:
    name = ROOT["properties"]["metadata"]["properties"]
    assert name == {"name": {"type": "string", "maxLength": 40}}
    (rule,) = ROOT["x-kubernetes-validations"]
    assert rule["rule"] == "self.metadata.name.matches(r'^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$')"
    assert rule["message"].startswith("must start with a letter, end with a letter or digit")
    assert rule["fieldPath"] == ".metadata.name"


def test_the_scale_subresource_has_replicas_and_selector() -> None:
    scale = VERSION["subresources"]["scale"]
    for path in scale.values():
        assert path in NODES
    assert VERSION["subresources"]["status"] == {}


def test_columns_print_fields_of_the_schema() -> None:
    columns = VERSION["additionalPrinterColumns"]
    shown = [column["name"] for column in columns if column["priority"] == 0]
    assert shown == ["Replicas", "Attainment", "Goodput", "Budget", "Phase", "Gate", "Age"]
    for column in columns:
        path = column["jsonPath"]
        assert path in NODES or path == ".metadata.creationTimestamp"
        assert column["description"]
