"""The two builds of a comparison, as `replay ab` names them on its command line."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError, UsageError
from goodput_replay.sending.target import parse_target

if TYPE_CHECKING:
    import argparse

    from goodput_core.cli import CommandParser

__all__ = ["RECORDED", "Build", "add_build_options", "add_recorded_revision", "read_builds"]

_OPTIONS: Final = ("-f", "--target", "--emulate")
RECORDED: Final = "--recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One of the two builds.

    Args:
        name: `baseline` or `candidate`.
        option: option of `replay` that names it; `--recorded` for a recorded baseline.
        value: its manifest or URL, or the folder of its recordings.
    """

    name: str
    option: str
    value: str

    @property
    def identity(self) -> str:
        """Text that is equal for two sides of the same build."""
        if self.option == "--target":
            return parse_target(self.value).url
        if self.option == RECORDED:
            return self.value
        try:
            return hashlib.sha256(Path(self.value).read_bytes()).hexdigest()
        except OSError as error:
            raise InputError(f"{self.value}: {error.strerror or 'cannot be read'}") from error


def add_build_options(parser: CommandParser) -> None:
    """Add the options that name the builds."""
    group = parser.add_argument_group("builds, the baseline first")
    for option, metavar, text in (
        ("--target", "URL", "running server"),
        ("--emulate", "MANIFEST", "manifest of a service to emulate in virtual time"),
    ):
        group.add_argument(option, metavar=metavar, action="append", default=[], help=text)
    group.add_argument(
        "-f",
        "--file",
        dest="file",
        metavar="MANIFEST",
        action="append",
        default=[],
        help="manifest of a service to start for each run",
    )
    group.add_argument(
        RECORDED,
        metavar="DIR",
        type=Path,
        help="instead of a baseline: folder with recordings of the old build against itself, made "
        "at different times; the new build is replayed once, and compared with the latest of them "
        "that has its requests",
    )
    add_recorded_revision(group)


def add_recorded_revision(parser: argparse._ActionsContainer) -> None:
    """Add the option `--recorded-revision`."""
    parser.add_argument(
        "--recorded-revision",
        metavar="NAME",
        help="use only recordings that this revision served, by the part of its name after the "
        "last hyphen",
    )


def read_builds(given: argparse.Namespace) -> tuple[Build, Build]:
    """Return baseline and candidate.

    Raises:
        UsageError: the options do not name two builds of the same kind.
    """
    named = [
        (option, value)
        for option, values in zip(_OPTIONS, (given.file, given.target, given.emulate), strict=True)
        for value in values
    ]
    if given.recorded is not None:
        if len(named) != 1 or named[0][0] == "--emulate":
            raise UsageError(
                f"replay ab: {RECORDED} needs one new build, with -f NEW or --target NEW"
            )
        for option in ("pairs", "max_pairs", "history"):
            if getattr(given, option) not in {None, 1}:
                raise UsageError(
                    f"replay ab: --{option.replace('_', '-')} cannot be combined with {RECORDED}: "
                    "further runs of the new build would share the conditions of the first; remove "
                    "it"
                )
        named.insert(0, (RECORDED, str(given.recorded)))
    elif given.recorded_revision is not None:
        raise UsageError(f"replay ab: --recorded-revision is only supported with {RECORDED}")
    elif len(named) != 2 or named[0][0] != named[1][0]:
        raise UsageError(
            "replay ab: name two builds with the same option, the baseline first: -f OLD -f NEW, "
            "--target OLD --target NEW, or --emulate OLD --emulate NEW"
        )
    (option, old), (new_option, new) = named
    return (
        Build(name="baseline", option=option, value=old),
        Build(name="candidate", option=new_option, value=new),
    )
