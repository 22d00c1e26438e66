"""Reading what was promised: a whole manifest, or a file with its `spec.slo` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import SpecError
from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import LLMService, SLOSpec
from goodput_engine.manifest_file import read_document
from goodput_replay.run.facts import Promise

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["promise_of", "read_promise"]


def read_promise(path: Path) -> Promise:
    """The classes of `--slo FILE`: a manifest, or the mapping that stands under `spec.slo`.

    Raises:
        InputError: the file cannot be read, or is neither.
        SpecError: a field that breaks a rule.
    """
    value = read_document(path)
    try:
        if isinstance(value, dict) and "apiVersion" in value:
            return promise_of(LLMService.from_dict(value).spec.slo)
        if isinstance(value, dict) and set(value) == {"slo"}:
            value = value["slo"]
        slo = decode(SLOSpec, value, "")
    except SpecError as error:
        raise error.at(str(path)) from error
    return promise_of(slo)


def promise_of(slo: SLOSpec) -> Promise:
    """The promise of a manifest's `spec.slo`."""
    return Promise(
        classes=tuple(slo.by_name().values()),
        default=slo.default_class,
        outage_s=slo.outage_seconds or 0,
    )
