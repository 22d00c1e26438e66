"""Watches the manifest's file for the *followed fields*, which may change while the engine runs.

These are the classes and their targets, the bounds of the token budget, and the token-budget law.
In a cluster, changes of these fields do not create a new revision. All other fields are read only
at the start. While the file is invalid, the last valid fields apply.
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
    """The manifest fields that may change while the engine runs.

    Args:
        slo: the SLO classes.
        core: the fields that are sent to the core.
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
    fields: FollowedFields,
    apply: Callable[[FollowedFields], None],
    *,
    every_s: float = _INTERVAL_S,
) -> None:
    """Pass changed fields to `apply`, until cancelled.

    Args:
        manifest: the file.
        fields: the fields that apply now.
        apply: called with the new fields.
        every_s: interval between checks of the file.
    """
    # The file may have changed while the engine started, so the first check reads it again.
    last_stamp: tuple[int, ...] | None = ()
    problem = ""
    while True:
        await asyncio.sleep(every_s)
        stamp = _stamp(manifest)
        if stamp == last_stamp:
            continue
        last_stamp = stamp
        try:
            # In a thread, because parsing takes milliseconds, which would delay tokens.
            new_fields = followed_fields(await asyncio.to_thread(read_manifest, manifest))
        except InputError as error:
            if problem != str(error):
                problem = str(error)
                _log.warning("manifest not followed", extra={"detail": problem})
            continue
        problem = ""
        if new_fields != fields:
            fields = new_fields
            apply(fields)
            core = fields.core
            _log.info(
                "manifest followed",
                extra={
                    "classes": list(fields.slo.classes),
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
