"""SLO classes from the command line, for a target without a manifest.

`--ttft`, `--tpot` and the like declare one class for every request. `--slo-class` declares a class
for the requests of that name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from goodput_core.cli import argument_type
from goodput_core.errors import did_you_mean
from goodput_core.slo.targets import (
    USUAL_CONFIDENCE,
    SLOClass,
    format_objective,
    parse_confidence,
    parse_objective,
)
from goodput_core.units import NS_PER_MS, parse_duration

if TYPE_CHECKING:
    import argparse
    from fractions import Fraction

__all__ = ["OTHER_CLASS", "add_confidence", "parse_slo_class", "parse_target_ms"]

OTHER_CLASS: Final = "default"
"""Name of the class of `--ttft` and the like."""

_MAX_MS: Final = 86_400_000
_MAX_NAME: Final = 40
_FIELDS: Final = {"ttft": "ttft_ms", "tpot": "tpot_ms", "tbt-p99": "tbt_p99_ms", "e2e": "e2e_ms"}
_OBJECTIVE: Final = "objective"
_EXAMPLE: Final = "chat:ttft=500ms,tpot=50ms,objective=99%"


def parse_target_ms(text: str) -> int:
    """Parse a latency target such as `500ms`; returns whole milliseconds.

    Raises:
        ValueError: the text is not a duration of whole milliseconds from 1ms to 1d.
    """
    ns = parse_duration(text)
    if ns % NS_PER_MS or not 1 <= ns // NS_PER_MS <= _MAX_MS:
        raise ValueError(f"{text!r} is not a target; give whole milliseconds from 1ms to 1d")
    return ns // NS_PER_MS


def parse_slo_class(text: str) -> SLOClass:
    """Parse a class such as `chat:ttft=500ms,tpot=50ms,objective=99%`.

    Raises:
        ValueError: the text is not a class, lacks `ttft` or `tpot`, or has an unknown target, a
            target twice or an invalid value.
    """
    name, colon, rest = text.partition(":")
    if not colon or not re.fullmatch(r"[^\s,=](?:[^,=]*[^\s,=])?", name) or len(name) > _MAX_NAME:
        raise ValueError(f"{text!r} is not an SLO class; write for example {_EXAMPLE}")
    values: dict[str, int] = {}
    objective: Fraction | None = None
    seen: set[str] = set()
    for part in rest.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or (key not in _FIELDS and key != _OBJECTIVE):
            known = (*_FIELDS, _OBJECTIVE)
            hint = did_you_mean(key, known) or f"; write {', '.join(known)}"
            raise ValueError(f"class {name!r}: {part.strip()!r} is not a target{hint}")
        if key in seen:
            raise ValueError(f"class {name!r}: {key} is given twice; remove one")
        seen.add(key)
        if key == _OBJECTIVE:
            objective = parse_objective(value)
        else:
            values[_FIELDS[key]] = parse_target_ms(value)
    if missing := [key for key in ("ttft", "tpot") if key not in seen]:
        lacks = " and no ".join(missing)
        raise ValueError(f"class {name!r} has no {lacks}; write for example {_EXAMPLE}")
    return SLOClass(name=name, objective=objective, **values)


def add_confidence(
    parser: argparse._ActionsContainer, result: str, *, default: Fraction | None
) -> None:
    """Add the option `--confidence`.

    Args:
        parser: parser or group of options.
        result: result to which the confidence applies, for the help.
        default: value if the option is not given; None to see that.
    """
    parser.add_argument(
        "--confidence",
        metavar="PERCENT",
        type=argument_type(parse_confidence, "PERCENT"),
        default=default,
        help=f"one-sided confidence of {result} (default: {format_objective(USUAL_CONFIDENCE)}%)",
    )
