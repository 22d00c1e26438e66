"""Declare the fields of a manifest once, for the decoder, the CRD, the JSON Schema and the docs.

The bounds of a field are declared with the field, in OpenAPI's terms. The API server and the
decoder therefore reject the same manifests at the same path. This module declares no resource
itself.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

__all__ = [
    "Cel",
    "CrossFieldRule",
    "DeclaredField",
    "FieldRule",
    "camel_case",
    "claim_path_rule",
    "cross_field_rules",
    "data_key_field",
    "declared_fields",
    "dns_label_field",
    "exactly_one_of",
    "image_field",
    "in_order",
    "label_name_field",
    "object_name_field",
    "quantities_field",
    "records_field",
    "reserved_prefix",
    "spec_field",
    "sub_path_field",
    "trace_field",
]

_RULE: Final = "goodput.rule"

_DNS_LABEL: Final = r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
_DNS_HINT: Final = (
    "start with a letter, end with a letter or digit, and hold only lower-case letters, digits "
    "and '-'"
)
# Kubernetes limits names that become a label value to 63 characters, and most others to 253.
_LABEL_NAME: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_SUBDOMAIN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
# pvc://CLAIM/PATH without the segments . and .., which the two expressions find anywhere in a text.
_CLAIM_PATH: Final = rf"^pvc://{_SUBDOMAIN.removeprefix('^').removesuffix('$')}(/|$)"
_DOT_SEGMENT: Final = r"/[.]{1,2}(/|$)"
_CLAIM: Final = r"pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_PATH: Final = r"[^\x00-\x20\x7f]+"
# Kubernetes' own pattern of a quantity, without signs: resources cannot be negative.
_QUANTITY: Final = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,3})?$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cel:
    """A validation rule of the API server.

    Args:
        rule: an expression of the Common Expression Language over `self`, true if valid.
        message: the API server's error message if it is false.
    """

    rule: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossFieldRule:
    """A rule between the fields of one object, for the API server and for the decoder.

    Args:
        field: the field to correct, as the manifest spells it; empty if no single field is wrong.
        cel: the rule for the API server.
        problem: the rule for the decoder: a function that returns the error of a decoded object,
            with the object's values; None if the object is valid.
    """

    field: str
    cel: Cel
    problem: Callable[[Any], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """The description and the bounds of one field, in OpenAPI's terms.

    Args:
        doc: the description for `kubectl explain` and for the docs.
        minimum: minimum of a number, inclusive.
        maximum: maximum of a number, inclusive.
        min_length: minimum number of characters.
        max_length: maximum number of characters.
        pattern: a regular expression that must match the complete text.
        pattern_hint: the pattern in words, after "must".
        format: OpenAPI's name of the text's format, which only the API server checks.
        min_items: minimum number of list items or map entries.
        max_items: maximum number of list items or map entries.
        int_or_string: True if the text may also be written as a bare whole number.
        key: the field by which the items of a list are unique.
        parse: converts the validated text to a value; its `ValueError` becomes a `SpecError`.
        cel: a rule for the API server. It rejects the texts that `parse` rejects although the other
            bounds accept them.
    """

    doc: str
    minimum: float | None = None
    maximum: float | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredField:
    """One field of a spec's dataclass.

    Args:
        attribute: the field's name in the dataclass.
        name: the field's name in the manifest.
        hint: the field's type, without None.
        rule: the field's bounds.
        required: True if a manifest must have the field.
        default: the value if the field is absent; None if the field is required.
    """

    attribute: str
    name: str
    hint: Any
    rule: FieldRule
    required: bool
    default: Any

    @property
    def container(self) -> Any:
        """`tuple` for a list, `Mapping` for a map, else None."""
        origin = get_origin(self.hint)
        return Mapping if origin not in {None, tuple} else origin

    @property
    def item(self) -> Any:
        """The type of a list's items or of a map's values; for other fields, the field's type."""
        if self.container is None:
            return self.hint
        return get_args(self.hint)[0 if self.container is tuple else 1]

    @property
    def nested(self) -> type[Any] | None:
        """The dataclass of an object or of a list's items; None for other types."""
        return self.item if isinstance(self.item, type) and is_dataclass(self.item) else None


def spec_field(doc: str, *, default: Any = ..., factory: Any = ..., **bounds: Any) -> Any:
    """Declare a field with its description, its default and its bounds (see `FieldRule`)."""
    metadata = {_RULE: FieldRule(doc=doc, **bounds)}
    if factory is not ...:
        return field(default_factory=factory, metadata=metadata)
    if default is not ...:
        return field(default=default, metadata=metadata)
    return field(metadata=metadata)


def dns_label_field(doc: str, **more: Any) -> Any:
    """Declare a name that is part of host names and of other objects' names."""
    return spec_field(doc, max_length=40, pattern=_DNS_LABEL, pattern_hint=_DNS_HINT, **more)


def label_name_field(doc: str, **more: Any) -> Any:
    """Declare a name of at most 63 characters, such as a namespace's."""
    hint = "hold lower-case letters, digits and '-' only"
    return spec_field(doc, max_length=63, pattern=_LABEL_NAME, pattern_hint=hint, **more)


def object_name_field(doc: str, **more: Any) -> Any:
    """Declare the name of a Kubernetes object, such as a Secret."""
    hint = "be a Kubernetes name: lower-case letters, digits, '-' and '.'"
    return spec_field(doc, max_length=253, pattern=_SUBDOMAIN, pattern_hint=hint, **more)


def data_key_field(doc: str, **more: Any) -> Any:
    """Declare a key of the data of a Secret or ConfigMap."""
    hint = "hold letters, digits, '-', '_' and '.' only"
    return spec_field(doc, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", pattern_hint=hint, **more)


def sub_path_field(doc: str) -> Any:
    """Declare an optional folder of a volume."""
    return spec_field(
        doc,
        default=None,
        max_length=512,
        pattern=r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$",
        pattern_hint="be a path without a leading slash",
    )


def image_field() -> Any:
    """Declare the container image of a workload."""
    doc = (
        "Container image; default: the image of the operator's release. Ignored outside a cluster."
    )
    return spec_field(doc, default=None, min_length=1, max_length=512)


def trace_field(doc: str, *, files: bool = False) -> Any:
    """Declare the place of a trace.

    Args:
        doc: the description.
        files: True to accept `file://PATH`, too.
    """
    schemes = "file|s3|gs" if files else "s3|gs"
    local = "file://PATH, " if files else ""
    return spec_field(
        f"{doc}: pvc://CLAIM/PATH, {local}s3://BUCKET/PATH, gs://BUCKET/PATH, or the word sample "
        "for the sample trace of the image.",
        max_length=512,
        pattern=rf"^(sample|{_CLAIM}/{_PATH}|({schemes})://{_PATH})$",
        pattern_hint=f"be pvc://CLAIM/PATH, {local}s3://BUCKET/PATH, gs://BUCKET/PATH or sample",
    )


def records_field(doc: str, **more: Any) -> Any:
    """Declare a folder for run folders, which outlives the pods that write it."""
    return spec_field(
        doc,
        max_length=512,
        pattern=rf"^({_CLAIM}(/{_PATH})?|(s3|gs)://{_PATH})$",
        pattern_hint="be pvc://CLAIM/PATH, s3://BUCKET/PATH or gs://BUCKET/PATH",
        **more,
    )


def recordings_field(doc: str, *, files: bool = False) -> Any:
    """Declare an optional folder with recordings of `replay ab`, which pods or processes read.

    Args:
        doc: the description.
        files: True to accept `file://PATH`, too.
    """
    return spec_field(
        doc,
        default=None,
        max_length=512,
        pattern=rf"^({_CLAIM}(/{_PATH})?{f'|file://{_PATH}' if files else ''})$",
        pattern_hint=f"be pvc://CLAIM/PATH{' or file://PATH' if files else ''}",
    )


def quantities_field(doc: str) -> Any:
    """Declare a map of resource quantities."""
    return spec_field(
        doc,
        factory=dict,
        max_items=16,
        max_length=32,
        pattern=_QUANTITY,
        pattern_hint="be a quantity such as 1, '500m' or '16Gi'",
        int_or_string=True,
    )


def in_order(low: str, high: str) -> CrossFieldRule:
    """Declare that the integer field `low` must not be above the integer field `high`."""
    low_name, high_name = camel_case(low), camel_case(high)

    def problem(value: Any) -> str | None:
        low_value, high_value = getattr(value, low), getattr(value, high)
        return f"{low_value} is above {high_name}, {high_value}" if low_value > high_value else None

    cel = Cel(rule=f"self.{low_name} <= self.{high_name}", message=f"must not be above {high_name}")
    return CrossFieldRule(field=low_name, cel=cel, problem=problem)


def exactly_one_of(*attributes: str) -> CrossFieldRule:
    """Declare that exactly one of these optional fields must be set."""
    names = [camel_case(attribute) for attribute in attributes]
    if len(names) == 2:
        message = f"must have either {names[0]} or {names[1]}"
        rule = f"has(self.{names[0]}) != has(self.{names[1]})"
    else:
        message = f"must have exactly one of {', '.join(names)}"
        presence = ", ".join(f"has(self.{name})" for name in names)
        rule = f"[{presence}].exists_one(named, named)"

    def problem(value: Any) -> str | None:
        count = sum(getattr(value, attribute) is not None for attribute in attributes)
        return None if count == 1 else message

    return CrossFieldRule(field="", cel=Cel(rule=rule, message=message), problem=problem)


def claim_path_rule(attribute: str, *, optional: bool = False) -> CrossFieldRule:
    """Declare that a `pvc://` text names a claim, and that its path stays within the claim.

    Args:
        attribute: the field.
        optional: True if the field may be absent.
    """
    message = (
        "must be pvc://CLAIM/PATH, with the name of a PersistentVolumeClaim and a path without the "
        "segments . and .."
    )
    name = camel_case(attribute)

    def problem(value: Any) -> str | None:
        source = getattr(value, attribute)
        if source is None or not source.startswith("pvc://"):
            return None
        if re.search(_CLAIM_PATH, source) and not re.search(_DOT_SEGMENT, source):
            return None
        return f"{message}, not {source[:80]!r}"

    absent = f"!has(self.{name}) || " if optional else ""
    cel = Cel(
        rule=f"{absent}!self.{name}.startsWith('pvc://') || "
        f"(self.{name}.matches(r'{_CLAIM_PATH}') && !self.{name}.matches(r'{_DOT_SEGMENT}'))",
        message=message,
    )
    return CrossFieldRule(field=name, cel=cel, problem=problem)


def reserved_prefix(prefix: str) -> CrossFieldRule:
    """Declare that a name must not begin with `prefix`, which only the operator uses."""

    def problem(value: Any) -> str | None:
        if not value.name.startswith(prefix):
            return None
        return f"{value.name!r} begins with {prefix}, which is reserved for the operator"

    cel = Cel(
        rule=f"!self.name.startsWith('{prefix}')",
        message=f"must not begin with {prefix}, which is reserved for the operator",
    )
    return CrossFieldRule(field="name", cel=cel, problem=problem)


def cross_field_rules(cls: type[Any]) -> tuple[CrossFieldRule, ...]:
    """Return the `RULES` of a spec's dataclass, empty if it has none."""
    return getattr(cls, "RULES", ())


def declared_fields(cls: type[Any]) -> tuple[DeclaredField, ...]:
    """Return the fields of a dataclass that was made with `spec_field`, in order."""
    return _declared(cls)  # type: ignore[arg-type] # mypy misses that a class is hashable


@cache
def _declared(cls: type[Any]) -> tuple[DeclaredField, ...]:
    hints = get_type_hints(cls)
    return tuple(
        DeclaredField(
            attribute=attribute.name,
            name=camel_case(attribute.name),
            hint=_without_none(hints[attribute.name]),
            rule=attribute.metadata.get(_RULE, FieldRule(doc="")),
            required=attribute.default is MISSING and attribute.default_factory is MISSING,
            default=_default(attribute),
        )
        for attribute in fields(cls)
    )


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in {Union, types.UnionType}:
        (only,) = [arg for arg in get_args(hint) if arg is not type(None)]
        return only
    return hint


def _default(attribute: Any) -> Any:
    if attribute.default_factory is not MISSING:
        return attribute.default_factory()
    return None if attribute.default is MISSING else attribute.default


def camel_case(name: str) -> str:
    """Return the manifest's spelling of a Python name: `ttft_ms` is `ttftMs`."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)
