"""The CustomResourceDefinition of TraceReplay: copies, compatibility, bounds, and its decoder."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.operator.crd.test_crd import nodes
from tests.operator.crd.test_crd_compatibility import breaking, schema_of

from goodput_core.cli import installed_version
from goodput_core.errors import SpecError
from goodput_core.spec.codec import decode
from goodput_core.spec.tracereplay import TraceReplaySpec
from goodput_operator.render.crd import render_replay_crd

if TYPE_CHECKING:
    from collections.abc import Mapping

CRD = render_replay_crd()
NODES = dict(nodes(schema_of(CRD), ""))
TEXT = yaml.safe_dump(CRD, sort_keys=False, width=100, allow_unicode=True)
FOLDER = Path(__file__).with_name("released") / "tracereplays"
COPIES = (
    Path(__file__).resolve().parents[3] / "charts/goodput/files/crd-tracereplays.yaml",
    FOLDER / f"{installed_version()}.yaml",
)
VALID: Mapping[str, Any] = {
    "trace": "pvc://traces/prod.parquet",
    "target": {"service": "chat"},
    "records": "s3://runs/nightly",
}
SLO = {"classes": [{"name": "chat", "ttftMs": 500, "tpotMs": 50, "objective": "99%"}]}


@pytest.mark.golden
@pytest.mark.parametrize("path", COPIES, ids=["chart", "present version"])
def test_the_copies_of_this_definition_are_equal(
    path: Path, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--rewrite-golden"):
        path.write_text(TEXT, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == TEXT, "the dataclasses changed; see `make golden`"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_only_optional_fields_are_added_since_a_release(path: Path) -> None:
    released = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert list(breaking(schema_of(released), schema_of(CRD))) == []


@pytest.mark.parametrize(
    "path", sorted(path for path in NODES if path.startswith((".spec", ".status")))
)
def test_every_text_list_and_map_is_bounded(path: str) -> None:
    node = NODES[path]
    if node.get("type") == "string" or "x-kubernetes-int-or-string" in node:
        assert {"maxLength", "enum"} & set(node)
    elif node["type"] == "array":
        assert node["maxItems"] > 0
    elif node["type"] == "object" and "properties" not in node:
        assert node["maxProperties"] > 0


def test_columns_print_fields_of_the_schema() -> None:
    (version,) = CRD["spec"]["versions"]
    columns = version["additionalPrinterColumns"]
    shown = [column["name"] for column in columns if column["priority"] == 0]
    assert shown == ["Phase", "Armed", "Verdict", "Reason", "Age"]
    for column in columns:
        assert column["jsonPath"] in NODES or column["jsonPath"] == ".metadata.creationTimestamp"
        assert column["description"]


def test_a_short_manifest_has_the_documented_defaults() -> None:
    spec = decode(TraceReplaySpec, dict(VALID), "spec")
    assert (spec.shards, spec.speed_percent, spec.rate_percent) == (1, 100, 100)
    assert (spec.allow_production, spec.gate, spec.slo, spec.history_limit) == (
        False, None, None, None,
    )  # fmt: skip
    gated = decode(TraceReplaySpec, {**VALID, "gate": {"confidence": "99%"}}, "spec")
    assert gated.gate is not None
    assert (gated.gate.confidence, gated.gate.compares) == (Fraction(99, 100), False)
    none = decode(
        TraceReplaySpec, {**VALID, "gate": {"margin": "0%", "history": "pvc://runs"}}, "spec"
    )
    assert none.gate is not None
    assert (none.gate.margin, none.gate.compares) == (Fraction(0), True)


INVALID = [
    ({"trace": "/traces/prod.parquet"}, "spec.trace: must be pvc://CLAIM/PATH"),
    ({"trace": "pvc://Traces/prod.parquet"}, "spec.trace: must be"),
    ({"trace": "pvc://traces"}, "spec.trace: must be"),
    ({"records": "sample"}, "spec.records: must be"),
    ({"trace": "pvc://traces/../a"}, "spec.trace: must be pvc://CLAIM/PATH"),
    ({"records": "pvc://runs/./a"}, "spec.records: must be pvc://CLAIM/PATH"),
    ({"target": {}}, "spec.target: must have either service or url"),
    ({"target": {"service": "chat", "url": "http://a"}}, "spec.target: must have either"),
    (
        {"target": {"service": "chat", "endpoint": "chat", "prompt": "tokens"}},
        "spec.target.prompt: is tokens, but with endpoint chat",
    ),
    (
        {"target": {"service": "chat", "prompt": "tokens", "tokenizer": "pvc://a"}},
        "spec.target.tokenizer: must be absent with prompt tokens",
    ),
    (
        {"target": {"service": "chat", "tokenizer": "file:///a"}},
        "spec.target.tokenizer: must be pvc://CLAIM/PATH",
    ),
    (
        {"target": {"service": "chat", "tokenizer": "pvc://a/.."}},
        "spec.target.tokenizer: must be pvc://CLAIM/PATH",
    ),
    ({"target": {"url": "http://llm:8000"}}, "spec.slo: is required with target.url"),
    ({"shards": 101}, "spec.shards: must lie in 1 to 100"),
    ({"gate": {"confidence": "5%"}}, "spec.gate.confidence: 5% is below 50%"),
    ({"gate": {"margin": "1%"}}, "spec.gate.margin: needs baseline or history"),
    (
        {"gate": {"margin": "100%", "baseline": "pvc://runs/a"}},
        "spec.gate.margin: '100%' is out of bounds",
    ),
    ({"gate": {"baseline": "runs/a"}}, "spec.gate.baseline: must be pvc://CLAIM/PATH"),
    ({"gate": {"baseline": "pvc://runs/../a"}}, "spec.gate.baseline: must be pvc://CLAIM/PATH"),
    ({"gate": {"history": "file:///runs/a"}}, "spec.gate.history: must be pvc://CLAIM/PATH"),
    ({"gate": {"history": "pvc://runs/./a"}}, "spec.gate.history: must be pvc://CLAIM/PATH"),
    ({"window": {"startSeconds": 9, "endSeconds": 9}}, "spec.window.startSeconds: 9 is not before"),
    ({"baseline": "runs/a"}, "spec.baseline: unknown field"),
]


@pytest.mark.parametrize(("change", "error"), INVALID, ids=[error for _, error in INVALID])
def test_an_invalid_replay_is_rejected_at_its_field(change: dict[str, Any], error: str) -> None:
    with pytest.raises(SpecError) as raised:
        decode(TraceReplaySpec, {**VALID, **change}, "spec")
    assert str(raised.value).startswith(error)
