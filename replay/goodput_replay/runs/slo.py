"""SLO classes of a run, read from a manifest or from `--slo FILE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.errors import SpecError
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import LLMService, SLOSpec
from goodput_engine.manifest_file import read_document

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SLOClasses", "read_slo", "slo_classes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOClasses:
    """SLO classes of a run, and the default class.

    Args:
        classes: classes in the manifest's order; empty if only targets of rows are judged.
        default: class of requests without a class; None without classes.
        other: class of requests whose own class is not among `classes`; its name is not sent to the
            target. None if such a request is an error.
        outage_s: the longest outage that the bounds take into account; 0 if none is declared.
    """

    classes: tuple[SLOClass, ...] = ()
    default: str | None = None
    other: str | None = None
    outage_s: int = 0

    def by_name(self) -> dict[str, SLOClass]:
        """Return the classes by name, in order."""
        return {c.name: c for c in self.classes}


def slo_classes(spec: SLOSpec) -> SLOClasses:
    """Return the classes of a manifest's `spec.slo`."""
    return SLOClasses(
        classes=tuple(spec.by_name().values()),
        default=spec.default_class,
        outage_s=spec.outage_seconds or 0,
    )


def read_slo(path: Path) -> SLOClasses:
    """Read the classes of `--slo FILE`: a manifest, or the mapping under `spec.slo`.

    Raises:
        InputError: the file cannot be read, or is not YAML.
        SpecError: a field is invalid.
    """
    value = read_document(path)
    try:
        if isinstance(value, dict) and "apiVersion" in value:
            return slo_classes(LLMService.from_dict(value).spec.slo)
        if isinstance(value, dict) and set(value) == {"slo"}:
            value = value["slo"]
        return slo_classes(decode(SLOSpec, value, ""))
    except SpecError as error:
        raise error.at(str(path)) from error
