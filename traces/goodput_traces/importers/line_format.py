"""Lines of text logs as records: a format with named fields, as in the server's configuration.

A format is matched by searching each literal once from left to right. The time is therefore linear
in the length of the line, whatever the format; regular expressions can take exponential time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

__all__ = ["LineFormat", "parse_line_format"]

_MAX_FORMAT: Final = 8192
_MAX_FIELDS: Final = 200
# nginx: $name or ${name}; Envoy: %NAME%, %NAME(ARGUMENT)% or %NAME(ARGUMENT):9%; ours: {name}.
_FIELD: Final = re.compile(
    r"\$(\w+)|\$\{(\w+)\}|%([A-Z][A-Z0-9_]*(?:\([^()]*\))?)(?::\d+)?%|\{([\w.-]+)\}", re.ASCII
)
_EMPTY: Final = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFormat:
    """Format of the lines of a log.

    Args:
        names: names of the fields, in order.
        literals: the text before each field, and the text after the last one.
        skip_unmatched: True to skip lines that do not match instead of rejecting the log.
    """

    names: tuple[str, ...]
    literals: tuple[str, ...]
    skip_unmatched: bool = False

    def match(self, line: str) -> dict[str, str | None]:
        """Return the values by field; a field ends at the first occurrence of the literal after it.

        A field with the value `-` or without characters has the value None.

        Raises:
            ValueError: the line does not match; the message names the field.
        """
        first, *others = self.literals
        if not line.startswith(first):
            raise ValueError(f"it does not start with {first[:40]!r}")
        at = len(first)
        values: dict[str, str | None] = {}
        for name, literal in zip(self.names, others, strict=True):
            is_last = name == self.names[-1]
            if is_last:
                end = len(line) - len(literal) if line.endswith(literal) else -1
            else:
                end = line.find(literal, at)
            if end < at:
                raise ValueError(f"there is no {literal[:40]!r} after the field {name}")
            value = line[at:end].strip()
            values[name] = None if value in {"", _EMPTY} else value
            at = end + len(literal)
        return values


def parse_line_format(text: str, *, skip_unmatched: bool = False) -> LineFormat:
    """Parse a format in the notation of nginx (`$name`), Envoy (`%NAME%`) or Goodput (`{name}`).

    Args:
        text: literals and fields.
        skip_unmatched: see `LineFormat`.

    Raises:
        ValueError: the format has no fields, has too many, or two fields have no text between them.
    """
    # Envoy's formats end in a line break, which single quotes in YAML keep as two characters.
    text = text.strip().removesuffix("\\n")
    if len(text) > _MAX_FORMAT:
        raise ValueError(f"is longer than {_MAX_FORMAT:,} characters; shorten it")
    names, literals, at = [], [], 0
    for match in _FIELD.finditer(text):
        names.append(next(name for name in match.groups() if name is not None))
        literals.append(text[at : match.start()])
        at = match.end()
    literals.append(text[at:])
    if not 0 < len(names) <= _MAX_FIELDS:
        raise ValueError(
            f"has {len(names)} fields, but 1 to {_MAX_FIELDS} are possible; write a field as $name "
            "(nginx), %NAME% (Envoy) or {name}"
        )
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"names the field {repeated} twice; rename one")
    for (before, after), literal in zip(pairwise(names), literals[1:], strict=False):
        if not literal:
            raise ValueError(
                f"has no text between the fields {before} and {after}, so the end of the first "
                "cannot be found; join them to one field"
            )
    return LineFormat(names=tuple(names), literals=tuple(literals), skip_unmatched=skip_unmatched)
