"""docs/run-folder.md lists every field and column as described in the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from goodput_replay.runs.json_results import schema_json
from goodput_replay.runs.records import RECORDS_SCHEMA
from goodput_replay.runs.server_metrics import SERVER_METRICS_SCHEMA
from goodput_replay.runs.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "run-folder.md"
_FIRST = ("Summary", "VerdictSummary", "ValiditySummary", "ClassSummary")


@pytest.mark.golden
@pytest.mark.parametrize("part", ["fields", "columns", "server columns"])
def test_the_page_lists_all_fields_and_columns(part: str, request: pytest.FixtureRequest) -> None:
    begin, end = f"<!-- {part}: begin -->\n", f"<!-- {part}: end -->"
    before, _, rest = _PAGE.read_text(encoding="utf-8").partition(begin)
    found, _, after = rest.partition(end)
    if part == "fields":
        lines = _fields()
    else:
        lines = _columns(RECORDS_SCHEMA if part == "columns" else SERVER_METRICS_SCHEMA)
    expected = "\n".join(lines) + "\n"
    if request.config.getoption("--rewrite-golden"):
        _PAGE.write_text(f"{before}{begin}{expected}{end}{after}", encoding="utf-8")
        return
    assert found == expected, "rewrite the page with `make golden`"


def _fields() -> Iterator[str]:
    definitions = json.loads(schema_json(Summary))["$defs"]
    objects = [name for name in definitions if "properties" in definitions[name]]
    for name in sorted(objects, key=lambda n: _FIRST.index(n) if n in _FIRST else len(_FIRST)):
        definition = definitions[name]
        yield ""
        yield f"### {name}"
        yield ""
        yield definition["description"]
        yield ""
        yield "| field | type | meaning |"
        yield "| --- | --- | --- |"
        for field, rules in definition["properties"].items():
            yield f"| `{field}` | {_type(rules)} | {rules['description']} |"
    yield ""
    yield "### Words"
    yield ""
    yield "| type | one of |"
    yield "| --- | --- |"
    for name, definition in definitions.items():
        if "enum" in definition:
            yield f"| {name} | {', '.join(f'`{word}`' for word in definition['enum'])} |"
    yield ""


def _type(rules: dict[str, Any]) -> str:
    if "anyOf" in rules:
        return " or ".join(_type(one) for one in rules["anyOf"])
    if "$ref" in rules:
        return str(rules["$ref"].rpartition("/")[2])
    if rules["type"] == "array":
        return f"list of {_type(rules['items'])}"
    if rules["type"] == "object":
        return f"object of {_type(rules['additionalProperties'])}"
    return str(rules["type"])


def _columns(schema: Any) -> Iterator[str]:
    yield ""
    yield "| column | type | meaning |"
    yield "| --- | --- | --- |"
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        name = f"list of {kind.value_type}" if pa.types.is_list(kind) else str(kind)
        text = field.metadata[b"description"].decode()
        null = " or null" if field.nullable else ""
        yield f"| `{field.name}` | {name}{null} | {text} |"
    yield ""
