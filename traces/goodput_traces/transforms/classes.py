"""Rules that assign SLO classes to rows: `batch: input_tokens >= 4000 and priority < 1`.

A rule is a class name, a colon and a condition. The condition is `*`, which matches every row, or
comparisons of columns with literals, joined by `and`. The first matching rule assigns the class; a
row without a matching rule keeps its class.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from goodput_traces.format.schema import TraceRow

__all__ = ["ClassRule", "Comparison", "assign_classes", "parse_class_rules"]

_NUMBER_COLUMNS: Final = frozenset(
    {
        "input_tokens",
        "output_tokens",
        "max_output_tokens",
        "turn",
        "priority",
        "delay_ms",
        "ttft_target_ms",
        "tpot_target_ms",
        "e2e_target_ms",
    }
)
_TEXT_COLUMNS: Final = frozenset(
    {"slo_class", "model_name", "org_id", "request_type", "provided_session_id"}
)
_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_COMPARISON: Final = re.compile(
    r"""\s*(?P<column>[a-z0-9_]+)\s*(?P<op>==|!=|<=|>=|<|>)\s*
        (?P<value>"[^"]*"|'[^']*'|[^\s"'<>=!]+)\s*(?:and\s|$)""",
    re.VERBOSE | re.ASCII,
)
_NUMBER: Final = re.compile(r"-?\d{1,15}(\.\d{1,9})?", re.ASCII)
_MAX_RULES: Final = 100
_EXAMPLE: Final = "write, for example, 'batch: input_tokens >= 4000' or 'interactive: *'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of a column with a literal; it does not hold for a row without a value.

    Args:
        column: column of the trace.
        op: operator, a key of `_OPERATORS`.
        text: the literal.
        number: its value; None if the column has texts.
    """

    column: str
    op: str
    text: str
    number: Fraction | None = None

    def holds(self, row: TraceRow) -> bool:
        """True if the comparison holds for the row."""
        value = getattr(row, self.column)
        literal = self.text if self.number is None else self.number
        return value is not None and _OPERATORS[self.op](value, literal)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRule:
    """An SLO class for the rows that satisfy every comparison."""

    slo_class: str
    comparisons: tuple[Comparison, ...]

    def matches(self, row: TraceRow) -> bool:
        """True if the row satisfies every comparison."""
        return all(comparison.holds(row) for comparison in self.comparisons)


def parse_class_rules(texts: Sequence[str]) -> tuple[ClassRule, ...]:
    """Parse rules in their order.

    Raises:
        ValueError: a rule is invalid. The message quotes the rule and shows a valid one.
    """
    if len(texts) > _MAX_RULES:
        raise ValueError(f"{len(texts)} class rules are too many; at most {_MAX_RULES} are allowed")
    return tuple(_parse_rule(text) for text in texts)


def assign_classes(rows: Iterable[TraceRow], rules: Sequence[ClassRule]) -> Iterator[TraceRow]:
    """Assign to every row the class of its first matching rule."""
    for row in rows:
        for rule in rules:
            if rule.matches(row):
                yield (
                    row
                    if row.slo_class == rule.slo_class
                    else replace(row, slo_class=rule.slo_class)
                )
                break
        else:
            yield row


def _parse_rule(text: str) -> ClassRule:
    name, colon, condition = text.partition(":")
    if not colon or not condition.strip():
        raise ValueError(f"{text!r} is not a class rule; {_EXAMPLE}")
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} in {text!r} is not a class name; use at most 63 lower-case letters, "
            "digits and dashes"
        )
    if condition.strip() == "*":
        return ClassRule(slo_class=name, comparisons=())
    comparisons = []
    rest = condition.strip()
    while rest:
        match = _COMPARISON.match(rest)
        if match is None:
            raise ValueError(
                f"cannot read {rest.strip()!r} in {text!r}; write comparisons (COLUMN OP VALUE) "
                "joined by 'and'; in place of 'or', add a second rule"
            )
        comparisons.append(_parse_comparison(match, text))
        rest = rest[match.end() :]
    return ClassRule(slo_class=name, comparisons=tuple(comparisons))


def _parse_comparison(match: re.Match[str], text: str) -> Comparison:
    column, op, raw = match["column"], match["op"], match["value"]
    if column in _NUMBER_COLUMNS:
        if not _NUMBER.fullmatch(raw):
            raise ValueError(
                f"{column} in {text!r} is compared with {raw!r}, which is not a number"
            )
        return Comparison(column=column, op=op, text=raw, number=Fraction(raw))
    if column in _TEXT_COLUMNS:
        return Comparison(column=column, op=op, text=raw.strip("\"'"))
    columns = ", ".join(sorted(_NUMBER_COLUMNS | _TEXT_COLUMNS))
    raise ValueError(f"column {column!r} in {text!r} cannot be compared; use one of {columns}")
