"""Watches the manifest's file for the fields that a running engine follows.

These are the classes and their targets, the bounds of the token budget, and the token-budget law.
In a cluster, changes of these fields do not create a new revision. Other fields are read once. An
invalid file changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_engine.core.build import followed_by_core
from goodput_engine.manifest_file import read_manifest
from goodput_engine.messages import FollowManifest
from goodput_engine.openai.headers import ServiceClasses

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService

__all__ = ["FollowedFields", "followed_fields", "watch_manifest"]

_INTERVAL_S: Final = 2.0
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedFields:
    """The manifest fields that a running engine follows.

    Args:
        slo: the SLO classes.
        core: the fields that the core follows.
    """

    slo: ServiceClasses
    core: FollowManifest


def followed_fields(service: LLMService) -> FollowedFields:
    """Return the followed fields of a manifest."""
    spec = service.spec
    return FollowedFields(
        slo=ServiceClasses(classes=spec.slo.by_name(), default=spec.slo.default_class),
        core=followed_by_core(spec.engine, mode=spec.control.mode),
    )


async def watch_manifest(
    manifest: Path,
    known: FollowedFields,
    apply: Callable[[FollowedFields], None],
    *,
    every_s: float = _INTERVAL_S,
) -> None:
    """Pass changed fields to `apply`, until cancelled.

    Args:
        manifest: the file.
        known: the fields as last read.
        apply: called with the new fields.
        every_s: interval between checks of the file.
    """
    # The file may have changed while the engine started, so the first check reads it again.
    seen: tuple[int, ...] | None = ()
    problem = ""
    while True:
        await asyncio.sleep(every_s)
        stamp = _stamp(manifest)
        if stamp == seen:
            continue
        seen = stamp
        try:
            # Parsing takes milliseconds, which would delay tokens.
            found = followed_fields(await asyncio.to_thread(read_manifest, manifest))
        except InputError as error:
            if problem != str(error):
                problem = str(error)
                _log.warning("manifest not followed", extra={"detail": problem})
            continue
        problem = ""
        if found != known:
            known = found
            apply(found)
            core = found.core
            _log.info(
                "manifest followed",
                extra={
                    "classes": list(found.slo.classes),
                    "token_budget": [core.min_token_budget, core.max_token_budget],
                    "budget_law": core.budget_law,
                },
            )


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
