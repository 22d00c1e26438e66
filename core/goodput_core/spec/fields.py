"""Declaring a manifest's fields once: for decoding here, and for the CRD's schema.

A field's bounds stand beside it as `Rule`, in the words of OpenAPI, so that the API server and
the local validator can refuse the same manifests and name the same path. This module knows
nothing of any resource.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "DNS_HINT",
    "DNS_LABEL",
    "NAME",
    "NAME_HINT",
    "QUANTITY",
    "QUANTITY_HINT",
    "RULE",
    "SUBDOMAIN",
    "SUBDOMAIN_HINT",
    "Between",
    "Cel",
    "Rule",
    "camel_case",
    "rules_between",
    "spec_field",
]

RULE: Final = "goodput.rule"

DNS_LABEL: Final = r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
DNS_HINT: Final = (
    "start with a letter, end with a letter or digit, and hold only lower-case letters, digits "
    "and '-'"
)
# Kubernetes' names: of what becomes a label (63 characters), and of most objects (253).
NAME: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
NAME_HINT: Final = "hold lower-case letters, digits and '-' only"
SUBDOMAIN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
SUBDOMAIN_HINT: Final = "be a name of Kubernetes: lower-case letters, digits, '-' and '.'"
# Kubernetes' own pattern of a quantity, without signs: less than nothing is no resource.
QUANTITY: Final = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,3})?$"
QUANTITY_HINT: Final = "be a quantity such as 1, '500m' or '16Gi'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cel:
    """A rule in the API server's words.

    Args:
        rule: an expression of the Common Expression Language over `self`, true where all is well.
        message: what the API server says where it is false.
    """

    rule: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """A rule between the fields of one object, for both validators.

    Args:
        field: the field to change, as the manifest spells it; empty: the object as a whole.
        cel: for the API server.
        problem: for this validator: what is wrong with a decoded object, with its values; None:
            nothing.
    """

    field: str
    cel: Cel
    problem: Callable[[Any], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The bounds of one field, in OpenAPI's terms.

    Args:
        doc: one sentence for `kubectl explain` and for the docs.
        minimum: least integer, inclusive.
        maximum: greatest integer, inclusive.
        min_length: least number of characters.
        max_length: greatest number of characters.
        pattern: a regular expression that the whole text matches.
        pattern_hint: what the pattern means, for people.
        format: OpenAPI's name of the text's form, which the API server alone checks.
        min_items: least number of list items or map entries.
        max_items: greatest number of list items or map entries.
        int_or_string: a text that may also be written as a bare whole number.
        key: the list is a map keyed by this field of its items: no two alike.
        parse: turns the validated text into a value; its `ValueError` becomes a `SpecError`.
        cel: what `parse` refuses and no other bound says, for the API server.
    """

    doc: str
    minimum: int | None = None
    maximum: int | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    pattern_hint: str | None = None
    format: str | None = None
    min_items: int | None = None
    max_items: int | None = None
    int_or_string: bool = False
    key: str | None = None
    parse: Callable[[str], object] | None = None
    cel: Cel | None = None


def spec_field(doc: str, *, default: Any = ..., factory: Any = ..., **bounds: Any) -> Any:
    """A dataclass field of a spec: its sentence, its default and the bounds of `Rule`."""
    metadata = {RULE: Rule(doc=doc, **bounds)}
    if factory is not ...:
        return field(default_factory=factory, metadata=metadata)
    if default is not ...:
        return field(default=default, metadata=metadata)
    return field(metadata=metadata)


def rules_between(cls: type[Any]) -> tuple[Between, ...]:
    """The rules between the fields of a spec's dataclass: its `BETWEEN`, where it has one."""
    return getattr(cls, "BETWEEN", ())


def camel_case(name: str) -> str:
    """The manifest's spelling of a Python name: `ttft_ms` is `ttftMs`."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)
