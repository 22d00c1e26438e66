"""Takes over the manifest's promises while the engine runs: a change of them restarts nothing.

Classes and their targets are all that is read again; what shapes the engine itself stands until
its end. A file that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_engine.manifest_file import read_manifest
from goodput_engine.server.promise import SLOBook

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService

__all__ = ["book_of", "follow_promises"]

_LOOK_S: Final = 2.0
_log: Final = logging.getLogger(__name__)


def book_of(service: LLMService) -> SLOBook:
    """The promises of a manifest."""
    slo = service.spec.slo
    return SLOBook(classes=slo.by_name(), default=slo.default_class)


async def follow_promises(
    manifest: Path, known: SLOBook, apply: Callable[[SLOBook], None], *, every_s: float = _LOOK_S
) -> None:
    """Hand changed promises to `apply`, until cancelled.

    Args:
        manifest: the file.
        known: its promises so far.
        apply: takes new ones.
        every_s: between two looks at the file.
    """
    seen = _stamp(manifest)
    problem = ""
    while True:
        await asyncio.sleep(every_s)
        stamp = _stamp(manifest)
        if stamp == seen:
            continue
        seen = stamp
        try:
            # Parsing takes milliseconds, in which no token would leave.
            found = book_of(await asyncio.to_thread(_read, manifest))
        except InputError as error:
            if problem != str(error):
                problem = str(error)
                _log.warning("promises kept", extra={"detail": problem})
            continue
        problem = ""
        if found != known:
            known = found
            apply(found)
            _log.info("promises changed", extra={"classes": list(found.classes)})


def _read(manifest: Path) -> LLMService:
    return read_manifest(manifest)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
