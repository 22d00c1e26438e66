"""Follows the manifest's file while the engine runs: what it takes over restarts nothing.

Classes and their targets, the bounds of the token budget and the law that sizes steps within it:
in a cluster, all that changes without a new revision. What else shapes the engine stands until
its end. A file that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_engine.core.configuration import followed_by_core
from goodput_engine.manifest_file import read_manifest
from goodput_engine.messages import FollowManifest
from goodput_engine.server.promise import SLOBook

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService

__all__ = ["Followed", "follow_manifest", "followed"]

_LOOK_S: Final = 2.0
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What a running engine takes over of its manifest.

    Args:
        slo: the classes that it promises.
        core: what its core is told.
    """

    slo: SLOBook
    core: FollowManifest


def followed(service: LLMService) -> Followed:
    """That part of a manifest."""
    spec = service.spec
    return Followed(
        slo=SLOBook(classes=spec.slo.by_name(), default=spec.slo.default_class),
        core=followed_by_core(spec.engine, mode=spec.control.mode),
    )


async def follow_manifest(
    manifest: Path, known: Followed, apply: Callable[[Followed], None], *, every_s: float = _LOOK_S
) -> None:
    """Hand what has changed to `apply`, until cancelled.

    Args:
        manifest: the file.
        known: what stood in it when it was read last.
        apply: takes what stands in it now.
        every_s: between two looks at the file.
    """
    # It may have changed since it was read: an engine takes its time to start.
    seen: tuple[int, ...] | None = ()
    problem = ""
    while True:
        await asyncio.sleep(every_s)
        stamp = _stamp(manifest)
        if stamp == seen:
            continue
        seen = stamp
        try:
            # Parsing takes milliseconds, in which no token would leave.
            found = followed(await asyncio.to_thread(_read, manifest))
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


def _read(manifest: Path) -> LLMService:
    return read_manifest(manifest)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
