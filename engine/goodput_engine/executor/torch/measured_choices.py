"""Choices that depend on this machine: measured at a start, and kept for later starts.

A choice is stored under everything that it depends on: the processor, the version of torch, and the
sizes of the model. A damaged entry, or a folder that cannot be written, only costs a measurement.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from goodput_engine.weights.locks import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["MeasuredChoice", "MeasuredChoices", "processor"]

_MAX_BYTES: Final = 10_000
_KEY_CHARACTERS: Final = 16
_TEMPORARY_S: Final = 24 * 60 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChoice:
    """A measured choice.

    Args:
        name: the choice.
        reason: the measurement, or the reason why there was none; for the log.
        temporary: True if another measurement may succeed, such as after a time-out. Such a choice
            is kept for a day.
    """

    name: str
    reason: str
    temporary: bool = False


class MeasuredChoices:
    """The choices of one machine.

    Args:
        folder: a folder of the cache; None to keep nothing.
        machine: properties of the machine on which every choice depends.
        now_s: returns the Unix time in seconds.
    """

    def __init__(
        self,
        folder: Path | None,
        machine: Mapping[str, object],
        *,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._now_s = now_s
        self._machine = dict(machine)

    def choose(
        self, subject: str, inputs: Mapping[str, object], measure: Callable[[], MeasuredChoice]
    ) -> MeasuredChoice:
        """Return a stored choice, or measure and store it.

        Processes that start together measure one after the other, and only the first one must.

        Args:
            subject: what is chosen, as a part of a file name.
            inputs: what the choice depends on beside the machine.
            measure: measures the choice.
        """
        key = json.dumps([self._machine, dict(inputs)], sort_keys=True, default=str)
        digest = hashlib.sha256(key.encode()).hexdigest()[:_KEY_CHARACTERS]
        with self._locked(subject) as folder:
            path = None if folder is None else folder / f"{subject}-{digest}.json"
            choice = None if path is None else self._read(path)
            if choice is None:
                choice = measure()
                if path is not None:
                    _write(path, choice)
            return choice

    def _read(self, path: Path) -> MeasuredChoice | None:
        """Return a stored choice; None if there is none, or if it is damaged or too old."""
        try:
            with path.open("rb") as file:
                choice = msgspec.json.decode(file.read(_MAX_BYTES), type=MeasuredChoice)
                age_s = self._now_s() - os.fstat(file.fileno()).st_mtime
        except (OSError, msgspec.DecodeError):
            return None
        return None if choice.temporary and not 0 <= age_s <= _TEMPORARY_S else choice

    @contextmanager
    def _locked(self, subject: str) -> Iterator[Path | None]:
        """Hold the lock of a subject, and yield the folder; None if it cannot be written."""
        folder = self._folder
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{subject}.lock").touch()
        except OSError:
            folder = None
        if folder is None:
            yield None
            return
        with locked(folder / f"{subject}.lock"):
            yield folder


def processor(threads: int) -> dict[str, object]:
    """Return the properties of this machine and of torch on which measurements depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    first: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        first.setdefault(name.strip(), value.strip())
    return {
        "processor": first.get("model name", platform.processor()),
        "flags": first.get("flags", first.get("Features", "")),
        "torch": torch.__version__,
        "threads": threads,
    }


def _write(path: Path, choice: MeasuredChoice) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(json.dumps(asdict(choice)), encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
