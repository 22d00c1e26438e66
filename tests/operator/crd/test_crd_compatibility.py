"""Within v1alpha1 only optional fields are added: later releases accept every earlier manifest.

`released/` contains the schema of each version. `make golden` rewrites that of the present version
(test_crd.py). The files of earlier versions, which are tagged, do not change.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from goodput_operator.render.crd import render_crd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RELEASED = sorted(Path(__file__).with_name("released").glob("*.yaml"))
# By keyword of a bound: True if a new value is narrower than the old one.
NARROWER: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "minimum": lambda old, new: new > old,
    "minLength": lambda old, new: new > old,
    "minItems": lambda old, new: new > old,
    "maximum": lambda old, new: new < old,
    "maxLength": lambda old, new: new < old,
    "maxItems": lambda old, new: new < old,
    "maxProperties": lambda old, new: new < old,
    "pattern": lambda old, new: new != old,
    "enum": lambda old, new: not set(old) <= set(new),
}
# Keywords of which any change is breaking.
FIXED: Final = (
    "type",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
)


def breaking(old: dict[str, Any], new: dict[str, Any], path: str = "") -> Iterator[str]:
    """Return changes that break a manifest or a client of the older schema."""
    yield from (f"{path}: {name} changed" for name in FIXED if old.get(name) != new.get(name))
    for name, narrower in NARROWER.items():
        if name in new and (name not in old or narrower(old[name], new[name])):
            yield f"{path}: {name} is narrower"
    if new.get("format") not in {None, old.get("format")}:
        yield f"{path}: format is narrower"
    if not keeps(old.get("default"), new.get("default")):
        yield f"{path}: another default"
    needed = set(new.get("required", [])) - set(old.get("required", []))
    yield from (f"{path}.{name}: newly required" for name in sorted(needed))
    rules = [rule["rule"] for rule in old.get("x-kubernetes-validations", [])]
    for rule in new.get("x-kubernetes-validations", []):
        if rule["rule"] not in rules:
            yield f"{path}: a new rule"
    for name, part in old.get("properties", {}).items():
        if name not in new.get("properties", {}):
            yield f"{path}.{name}: removed"
        else:
            yield from breaking(part, new["properties"][name], f"{path}.{name}")
    for inside in ("items", "additionalProperties"):
        if inside in old:
            yield from breaking(old[inside], new.get(inside, {}), f"{path}[]")


def keeps(old: Any, new: Any) -> bool:
    """True if a default has the same meaning; the default of an object may add new fields."""
    if isinstance(new, dict):
        return all(name in new and keeps(part, new[name]) for name, part in (old or {}).items())
    return bool(old == new)


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    (version,) = crd["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)
def test_only_optional_fields_are_added_since_a_release(path: Path) -> None:
    released = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert list(breaking(schema_of(released), schema_of(render_crd()))) == []
    before, now = released["spec"], render_crd()["spec"]
    assert now["names"] == before["names"]
    assert now["scope"] == before["scope"]
    assert [v["name"] for v in now["versions"]] == [v["name"] for v in before["versions"]]
    assert now["versions"][0]["subresources"] == before["versions"][0]["subresources"]


def test_there_is_a_release_to_compare_with() -> None:
    assert RELEASED


def engine(schema: dict[str, Any]) -> Any:
    return schema["properties"]["spec"]["properties"]["engine"]["properties"]


def classes(schema: dict[str, Any]) -> Any:
    slo = schema["properties"]["spec"]["properties"]["slo"]
    return slo["properties"]["classes"]


# A change of the schema, and the reported break; None if it breaks no client.
CHANGES: list[tuple[str, Callable[[dict[str, Any]], object], str | None]] = [
    ("a field removed", lambda s: engine(s).pop("image"), "image: removed"),
    (
        "an optional field added",
        lambda s: engine(s).update(extra={"type": "string", "default": "x", "maxLength": 3}),
        None,
    ),
    (
        "an object with rules added",
        lambda s: engine(s).update(extra={"type": "object", "required": ["a"]}),
        None,
    ),
    (
        "a default of a new field",
        lambda s: engine(s)["tokenBudget"]["default"].update(extra=1),
        None,
    ),
    ("a field newly required", lambda s: classes(s)["items"]["required"].append("e2eMs"), "e2eMs:"),
    ("a field no longer required", lambda s: classes(s)["items"]["required"].remove("name"), None),
    ("another type", lambda s: engine(s)["image"].update(type="integer"), "type changed"),
    ("another default", lambda s: engine(s)["maxNumSeqs"].update(default=1), "another default"),
    ("a default gone", lambda s: engine(s)["maxNumSeqs"].pop("default"), "another default"),
    ("a lower maximum", lambda s: engine(s)["maxNumSeqs"].update(maximum=9), "maximum is narrower"),
    ("a higher maximum", lambda s: engine(s)["maxNumSeqs"].update(maximum=1 << 30), None),
    ("a new bound", lambda s: engine(s)["image"].update(pattern="^a$"), "pattern is narrower"),
    ("a bound gone", lambda s: engine(s)["image"].pop("maxLength"), None),
    ("a shorter list", lambda s: classes(s).update(maxItems=2), "maxItems is narrower"),
    ("a removed choice", lambda s: engine(s)["policy"]["enum"].remove("slo"), "enum is narrower"),
    ("an added choice", lambda s: engine(s)["policy"]["enum"].append("edf"), None),
    ("another key", lambda s: classes(s).pop("x-kubernetes-list-map-keys"), "keys changed"),
    (
        "a new rule",
        lambda s: engine(s)["tokenBudget"]["x-kubernetes-validations"].append({"rule": "false"}),
        "a new rule",
    ),
    (
        "a rule gone",
        lambda s: engine(s)["tokenBudget"]["x-kubernetes-validations"].clear(),
        None,
    ),
    (
        "another description",
        lambda s: engine(s)["image"].update(description="An image."),
        None,
    ),
]


@pytest.mark.parametrize(
    ("change", "reported"),
    [(c, reported) for _, c, reported in CHANGES],
    ids=[name for name, _, _ in CHANGES],
)
def test_a_breaking_change_is_named(
    change: Callable[[dict[str, Any]], object], reported: str | None
) -> None:
    old = schema_of(render_crd())
    new = copy.deepcopy(old)
    change(new)
    found = list(breaking(old, new))
    if reported is None:
        assert found == []
    else:
        assert len(found) == 1
        assert reported in found[0]
