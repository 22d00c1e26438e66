"""The JSON of every command has a documented form: a shipped schema, or a table of its fields."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.manifests import manifest, write_manifest
from tests.replay.compare.recorded import chat_run

from goodput_core.dispatch import run_command
from goodput_replay.compare.comparison import ComparisonResult
from goodput_replay.compare.gate import GateResult
from goodput_replay.runs.files import SUMMARY_FILE
from goodput_replay.runs.json_results import schema_json
from goodput_replay.runs.summary import Summary
from goodput_replay.sweep.capacity_result import CapacityResult

if TYPE_CHECKING:
    from collections.abc import Iterator

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_SCHEMAS: dict[type, tuple[str, str]] = {
    Summary: ("runs", "summary"),
    GateResult: ("compare", "gate"),
    ComparisonResult: ("compare", "comparison"),
    CapacityResult: ("sweep", "capacity"),
}
_TABLES = [
    (GateResult, "gate.md", ("GateResult", "GateClassResult", "CheckResult")),
    (ComparisonResult, "compare.md", ("ComparisonResult", "RunComparison", "ClassComparison")),
    (CapacityResult, "capacity.md", ("CapacityResult", "ProbeResult")),
]


def _shipped(kind: type) -> Path:
    package, name = _SCHEMAS[kind]
    return Path(str(files(f"goodput_replay.{package}").joinpath(f"{name}.schema.json")))


def _by_name(kind: type) -> str:
    return kind.__name__


@pytest.mark.golden
@pytest.mark.parametrize("kind", _SCHEMAS, ids=_by_name)
def test_the_shipped_schema_matches_the_code(kind: type, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-golden"):
        _shipped(kind).write_bytes(schema_json(kind))
    assert _shipped(kind).read_bytes() == schema_json(kind), "rewrite it with `make golden`"


@pytest.mark.parametrize("kind", _SCHEMAS, ids=_by_name)
def test_every_field_of_a_schema_is_described(kind: type) -> None:
    for name, definition in json.loads(schema_json(kind))["$defs"].items():
        for field, rules in definition.get("properties", {}).items():
            assert rules.get("description"), f"{name}.{field} is not described"


@pytest.mark.golden
@pytest.mark.parametrize(("kind", "page", "names"), _TABLES, ids=[page for _, page, _ in _TABLES])
def test_a_page_lists_the_fields_of_its_result(
    kind: type, page: str, names: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    before, found, after = _read_part(page, "fields")
    expected = "\n".join(_describe_fields(kind, names)) + "\n"
    if request.config.getoption("--rewrite-golden"):
        (_DOCS / page).write_text(f"{before}{expected}{after}", "utf-8")
        return
    assert found == expected, "rewrite the page with `make golden`"


def _read_part(page: str, name: str) -> tuple[str, str, str]:
    """Return the text of a page before, between and after the two marks of a part."""
    text = (_DOCS / page).read_text("utf-8")
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, mark, rest = text.partition(begin)
    found, last, after = rest.partition(end)
    assert mark
    assert last
    return before + mark, found, last + after


def _describe_fields(kind: type, names: tuple[str, ...]) -> Iterator[str]:
    definitions = json.loads(schema_json(kind))["$defs"]
    for name in names:
        yield ""
        yield f"**{definitions[name]['description'].removesuffix('.')}** (`{name}`)"
        yield ""
        yield "| field | meaning |"
        yield "| --- | --- |"
        for field, rules in definitions[name]["properties"].items():
            yield f"| `{field}` | {rules['description']} |"
    yield ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "good": chat_run(folder / "good"),
        "bad": chat_run(folder / "bad", missed=range(0, 600, 7), rejected={40}),
        "other": chat_run(folder / "other", seconds=30),
        "late": chat_run(folder / "late", lag_ms=300),
        "few": chat_run(folder / "few", seconds=2, per_s=1),
    }


@pytest.mark.parametrize(
    "arguments",
    [
        "gate good",
        "gate bad --baseline good",
        "gate late --baseline good",
        "gate few",
        "compare good bad",
        "compare good other late few",
    ],
)
def test_a_result_follows_its_schema(
    arguments: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(runs.get(word, word)) for word in arguments.split()]
    assert run_command(["replay", *words, "--json"]) in range(4)
    result = capsys.readouterr().out
    kind = GateResult if words[0] == "gate" else ComparisonResult
    assert _problems(kind, result, tmp_path) == ""
    # The schema is no empty promise: it rejects a result without a field, or with another type.
    field = "verdict" if kind is GateResult else "comparisons"
    for wrong in ({}, {field: 7}):
        changed = {key: value for key, value in json.loads(result).items() if key != field} | wrong
        assert field in _problems(kind, json.dumps(changed), tmp_path)


def test_a_capacity_and_the_summaries_of_its_probes_follow_their_schemas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = manifest("chat")["spec"]["slo"]["classes"]
    chat = write_manifest(
        tmp_path,
        "chat",
        replicas=1,
        model__source="emulated://llama-3-8b-h100",
        slo__classes=[one | {"objective": "90%"} for one in classes],
    )
    words = ["capacity", "--trace", "sample", "--emulate", str(chat), "--out", str(tmp_path / "c")]
    words += ["--window", "..20s", "--probes", "2", "--json"]
    assert run_command(["replay", *words]) in range(3)
    result = capsys.readouterr().out
    assert json.loads(result)["version"] == "1"
    assert _problems(CapacityResult, result, tmp_path) == ""
    for probe in json.loads(result)["probes"]:
        summary = (Path(probe["run"]) / SUMMARY_FILE).read_text("utf-8")
        assert _problems(Summary, summary, tmp_path) == ""


def _problems(kind: type, text: str, folder: Path) -> str:
    """Return the differences of a result from its shipped schema."""
    path = folder / "result.json"
    path.write_text(text, "utf-8")
    checker = Path(sys.executable).parent / "check-jsonschema"
    command = map(str, (checker, "--schemafile", _shipped(kind), path))
    done = subprocess.run([*command], capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout if done.returncode else ""


@pytest.mark.parametrize(
    ("page", "part", "command"),
    [
        (
            "replay.md",
            "plan",
            "replay --trace sample --dry-run --json --sessions causal --shard 1/2",
        ),
        ("traces.md", "description", "trace describe sample --json"),
        ("traces.md", "likeness", "trace synthesize --like sample -o {out} --json"),
    ],
    ids=["dry-run", "describe", "synthesize"],
)
def test_a_table_lists_exactly_the_fields_that_the_command_prints(
    page: str,
    part: str,
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, table, _ = _read_part(page, part)
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    argv = command.format(out=tmp_path / "like.parquet").split()
    assert run_command(argv) == 0
    printed = set(_paths(json.loads(capsys.readouterr().out)))
    assert sorted(documented) == sorted(printed)


def _paths(values: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the fields in an output, those of its objects after a point."""
    for key, value in values.items():
        if key in {"metadata", "arrivals", "prompt", "output", "prefixes"}:
            yield from (f"{key}.{inner}" for inner in value)
        else:
            yield re.sub(r"(?<=^class\.)\w+", "NAME", key)
