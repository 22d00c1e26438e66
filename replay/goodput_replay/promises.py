"""Reading what was promised: a whole manifest, or a file with its `spec.slo` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from goodput_core.errors import InputError, SpecError
from goodput_core.spec.decode import decode
from goodput_core.spec.manifest import MAX_MANIFEST_BYTES, parse_manifest
from goodput_core.spec.promise import SLOSpec
from goodput_core.support import require_built
from goodput_replay.run.facts import Promise

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService

__all__ = ["read_manifest", "read_promise"]


def read_manifest(path: Path) -> LLMService:
    """A validated manifest that this version can run.

    Raises:
        InputError: the file cannot be read, or is no manifest.
        SpecError: a field that breaks a rule or is not built yet.
    """
    service = parse_manifest(_read(path), source=str(path), parse_documents=yaml.safe_load_all)
    try:
        require_built(service)
    except SpecError as error:
        raise error.at(str(path)) from error
    return service


def read_promise(path: Path) -> Promise:
    """The classes of `--slo FILE`: a manifest, or the mapping that stands under `spec.slo`.

    Raises:
        InputError: the file cannot be read, or is neither.
        SpecError: a field that breaks a rule.
    """
    text = _read(path)
    if "apiVersion" in text:
        service = parse_manifest(text, source=str(path), parse_documents=yaml.safe_load_all)
        return promise_of(service.spec.slo)
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"{path}: not YAML: {reason}") from error
    if isinstance(value, dict) and set(value) == {"slo"}:
        value = value["slo"]
    try:
        slo = decode(SLOSpec, value, "")
        slo.check("slo")
    except SpecError as error:
        raise error.at(str(path)) from error
    return promise_of(slo)


def promise_of(slo: SLOSpec) -> Promise:
    """The promise of a manifest's `spec.slo`."""
    return Promise(classes=tuple(slo.by_name().values()), default=slo.default_class)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        return data.decode()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not text; a manifest is YAML in UTF-8") from error
