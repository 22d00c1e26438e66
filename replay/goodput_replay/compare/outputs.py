"""The result of a gate as a table, JUnit XML, Markdown, and the answers of rollout controllers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal
from xml.etree import ElementTree as ET

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from goodput_core.slo.gate import cut_points, format_points
from goodput_core.slo.verdict import VerdictKind
from goodput_core.text import printable
from goodput_replay.runs.formatting import format_confidence, format_percent
from goodput_replay.runs.tables import choose_table
from goodput_replay.runs.terminal import VERDICT_STYLES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rich.console import Console

    from goodput_replay.compare.comparison import ClassComparison
    from goodput_replay.compare.gate import GateClassResult, GateResult

__all__ = ["junit_xml", "markdown", "print_result"]

_SUITE: Final = "goodput gate"
_BADGES: Final = {
    VerdictKind.PASS: "✅",
    VerdictKind.FAIL: "❌",
    VerdictKind.INCONCLUSIVE: "❔",
    VerdictKind.INVALID: "⚠️",
}
_LEFT_OUT: Final = ("gained", "lost")
"""Columns that a narrow terminal leaves out."""
# Entities end mentions, references to issues, and addresses that would become links.
_ESCAPES: Final = {
    **{ord(mark): f"\\{mark}" for mark in "\\|*_`[]~"},
    **{ord(mark): f"&#{ord(mark)};" for mark in "&<>@#:"},
}
_SEVERITY: Final = (
    VerdictKind.PASS,
    VerdictKind.INCONCLUSIVE,
    VerdictKind.INVALID,
    VerdictKind.FAIL,
)


def print_result(result: GateResult, console: Console) -> None:
    """Print the table of classes and the verdict; plain text if the console is not a terminal."""
    headers, rows = _rows(result)
    forms = [_table(headers, rows, without) for without in ((), _LEFT_OUT)]
    console.print(choose_table(forms, console))
    console.print(Text(printable(_describe(result))))
    console.print(
        Text.assemble(
            (result.verdict.value, VERDICT_STYLES[result.verdict]),
            f" ({result.reason.value}) ",
            printable(result.sentence),
        )
    )


def markdown(result: GateResult) -> str:
    """Return the result as Markdown for a comment on a pull request."""
    headers, rows = _rows(result)
    lines = [
        f"### {_BADGES[result.verdict]} {result.verdict.value} ({result.reason.value})",
        "",
        _escape(result.sentence),
        "",
        "| " + " | ".join(headers) + " |",
        "| --- |" + " ---: |" * (len(headers) - 1),
        *("| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows),
        "",
        _escape(_describe(result)),
    ]
    return "\n".join(lines) + "\n"


def junit_xml(result: GateResult) -> bytes:
    """Return the result as JUnit XML, one test case per class and rule.

    Only PASS is a passed test case. FAIL is a failure; INCONCLUSIVE and INVALID are errors, because
    most readers of the format count a skipped test case as a success.
    """
    suite = ET.Element("testsuite", name=_SUITE)
    counts = {"failure": 0, "error": 0}
    cases = [
        (one.name, check.rule.value, check.verdict, check.reason.value, check.sentence)
        for one in result.classes
        for check in one.checks
    ]
    if result.verdict is VerdictKind.INVALID or not cases:
        cases = [
            ("all classes", "runs", result.verdict, result.reason.value, result.sentence),
            *(case for case in cases if result.verdict is not VerdictKind.INVALID),
        ]
    for name, rule, verdict, reason, sentence in cases:
        case = ET.SubElement(suite, "testcase", classname=_xml_text(name or "–"), name=rule)
        if verdict is VerdictKind.PASS:
            ET.SubElement(case, "system-out").text = _xml_text(sentence)
            continue
        tag = "failure" if verdict is VerdictKind.FAIL else "error"
        counts[tag] += 1
        element = ET.SubElement(case, tag, type=reason, message=_xml_text(sentence))
        element.text = _xml_text(f"{verdict.value}: {sentence}")
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], without: Collection[str]
) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown = [number for number, header in enumerate(headers) if header not in without]
    for number in shown:
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(headers[number], justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(row[number])) for number in shown))
    return table


def _rows(result: GateResult) -> tuple[list[str], list[list[str]]]:
    """Return the headers and the cells of the table of classes."""
    compared = bool(result.baselines)
    headers = ["class", "candidate", "at least", "objective", "verdict"]
    if compared:
        headers = [
            "class", "baseline", "candidate", "at least", "objective", "difference", "bounds",
            "gained", "lost", "verdict",
        ]  # fmt: skip
    # Classes of an invalid comparison have no verdict.
    judged = result.verdict is not VerdictKind.INVALID
    return headers, [
        _row(one, compared=compared, judged=judged) for one in result.classes if one.total
    ]


def _row(one: GateClassResult, *, compared: bool, judged: bool) -> list[str]:
    worst = max((check.verdict for check in one.checks), key=_SEVERITY.index, default=None)
    shared = [format_percent(one.lower), one.objective or "–"]
    verdict = "–" if worst is None or not judged else worst.value
    if not compared:
        return [one.name or "–", format_percent(one.attainment), *shared, verdict]
    return [
        one.name or "–",
        format_percent(one.baseline_attainment),
        format_percent(one.attainment),
        *shared,
        *difference_cells(one),
        f"{sum(pair.gained for pair in one.pairs):,}",
        f"{sum(pair.lost for pair in one.pairs):,}",
        verdict,
    ]


def difference_cells(one: GateClassResult | ClassComparison) -> tuple[str, str]:
    """Return the difference in attainment and its bounds, in percentage points."""
    if one.difference is None or one.difference_lower is None or one.difference_upper is None:
        return "–", "–"
    lower, upper = cut_points(one.difference_lower), cut_points(one.difference_upper, up=True)
    return cut_points(one.difference), f"{lower} … {upper}"


def _describe(result: GateResult) -> str:
    """Return a sentence on the runs and the bounds."""
    runs = len(result.candidates)
    confidence = format_confidence(result.confidence)
    if result.margin is None:
        subject = "1 run" if runs == 1 else f"{runs} runs"
        text = f"{subject} of the candidate, each bound with {confidence} confidence."
        if runs == 1 and not result.virtual:
            text += " The spread between runs is not included."
    else:
        subject = "1 pair" if runs == 1 else f"{runs} pairs"
        text = (
            f"{subject} of runs, margin {format_points(result.margin).lstrip('+')}, each bound "
            f"with {confidence} confidence. Differences are in percentage points."
        )
    if result.dropped:
        text += f" {result.dropped:,} requests were not judged in both runs of a pair."
    if result.virtual:
        text += " The runs were in virtual time, which has no noise between runs."
    return " ".join([text, *(f"Warning: {warning}" for warning in result.warnings)])


def _escape(text: str) -> str:
    """Escape Markdown's and HTML's special characters, so that names stay text."""
    return printable(text).translate(_ESCAPES)


def _xml_text(text: str) -> str:
    """Replace characters that XML does not allow."""
    return printable(text)
