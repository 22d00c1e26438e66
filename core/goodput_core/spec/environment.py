"""Environment variables that a manifest adds to a container: plain, or read from a Secret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from goodput_core.spec.fields import SUBDOMAIN, SUBDOMAIN_HINT, Between, Cel, spec_field

__all__ = ["EnvVarSourceSpec", "EnvVarSpec", "KeyRefSpec"]

_RESERVED: Final = "GOODPUT_"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRefSpec:
    """One key of a Secret or ConfigMap in the service's namespace."""

    name: str = spec_field(
        "The object.", max_length=253, pattern=SUBDOMAIN, pattern_hint=SUBDOMAIN_HINT
    )
    key: str = spec_field(
        "The key of its data.",
        max_length=253,
        pattern=r"^[-._a-zA-Z0-9]+$",
        pattern_hint="hold letters, digits, '-', '_' and '.' only",
    )
    optional: bool = spec_field("Start without it where it is missing.", default=False)


def _not_one_source(source: EnvVarSourceSpec) -> str | None:
    if (source.secret_key_ref is None) != (source.config_map_key_ref is None):
        return None
    return "must have either secretKeyRef or configMapKeyRef"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVarSourceSpec:
    """Where a variable's value stands."""

    BETWEEN: ClassVar[tuple[Between, ...]] = (
        Between(
            field="",
            cel=Cel(
                rule="has(self.secretKeyRef) != has(self.configMapKeyRef)",
                message="must have either secretKeyRef or configMapKeyRef",
            ),
            problem=_not_one_source,
        ),
    )

    secret_key_ref: KeyRefSpec | None = spec_field("A key of a Secret.", default=None)
    config_map_key_ref: KeyRefSpec | None = spec_field("A key of a ConfigMap.", default=None)


def _reserved(variable: EnvVarSpec) -> str | None:
    if not variable.name.startswith(_RESERVED):
        return None
    return f"{variable.name!r} begins with {_RESERVED}, which is the operator's"


def _not_one_value(variable: EnvVarSpec) -> str | None:
    if (variable.value is None) != (variable.value_from is None):
        return None
    return "must have either value or valueFrom"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVarSpec:
    """One environment variable."""

    BETWEEN: ClassVar[tuple[Between, ...]] = (
        Between(
            field="name",
            cel=Cel(
                rule=f"!self.name.startsWith('{_RESERVED}')",
                message=f"must not begin with {_RESERVED}, which is the operator's",
            ),
            problem=_reserved,
        ),
        Between(
            field="",
            cel=Cel(
                rule="has(self.value) != has(self.valueFrom)",
                message="must have either value or valueFrom",
            ),
            problem=_not_one_value,
        ),
    )

    name: str = spec_field(
        "The variable's name.",
        max_length=128,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        pattern_hint="hold letters, digits and '_' only, and begin with no digit",
    )
    value: str | None = spec_field("Its value.", default=None, max_length=4096)
    value_from: EnvVarSourceSpec | None = spec_field("Where its value stands.", default=None)
