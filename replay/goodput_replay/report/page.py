"""Build HTML pages that draw charts from embedded data, without a network.

A page is one file: the base template, one style sheet, uPlot, `charts.js`, and a JSON block with
the figures. Its content security policy lists the hashes of these scripts and styles and forbids
everything else, so that a text of a trace or a server cannot become code. Texts are escaped in the
templates and in the JSON block. A template extends `base.html.j2`. The macros `switches` and
`figures` of `macros.html.j2` place the switches and the charts.

The report of a run, the live page, `replay watch` and the comparison of runs use this module. It
knows none of them.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import msgspec
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from goodput_core.text import printable
from goodput_replay.report.figures import COLOURS, Figure
from goodput_replay.runs.formatting import (
    describe_emulation,
    format_confidence,
    format_count,
    format_ms,
    format_percent,
    format_rate,
    format_seconds,
)

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["PageData", "encode_texts", "load_template", "policy", "render_page"]

_STYLES: Final = ("uplot/uPlot.min.css", "style.css")
_SCRIPTS: Final = ("uplot/uPlot.iife.min.js", "charts.js")
_FILTERS: Final[dict[str, Callable[..., str]]] = {
    "confidence": format_confidence,
    "count": format_count,
    "duration_s": format_seconds,
    "emulation": describe_emulation,
    "ms": format_ms,
    "percent": format_percent,
    "rate": format_rate,
}
_SPACES: Final = "\n\t\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}"
# An escape in JSON, or a character outside ASCII or not printable.
_SPECIAL: Final = re.compile(r"\\(?:u[0-9a-f]{4}|.)|[^\x20-\x7e]")
# In a script element, `<` could begin `</script>` or `<!--`.
_ESCAPED: Final = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """The JSON block of a page.

    Args:
        groups: names that the page can show or hide in all figures, such as classes.
        figures: figures by the order in which they are drawn.
    """

    groups: Sequence[str]
    figures: Sequence[Figure]


def render_page(
    template: str,
    *,
    title: str,
    data: PageData,
    context: Mapping[str, object],
    scripts: Sequence[str] = (),
    live: bool = False,
) -> str:
    """Return a page.

    Args:
        template: file name of the template in `assets`.
        title: title of the window.
        data: figures to draw.
        context: variables of the template.
        scripts: file names of further scripts in `assets`, which run after `charts.js`.
        live: True if the page may request updates from the server that it came from.
    """
    return load_template(template).render(
        context,
        title=title,
        policy=policy(scripts, live=live),
        style=_mark_safe(_style()),
        scripts=[_mark_safe(_read(name)) for name in (*_SCRIPTS, *scripts)],
        data=_mark_safe(_encode(data)),
    )


@cache
def load_template(name: str) -> Template:
    """Return a template of `assets`, which escapes every text."""
    return _environment().get_template(name)


def policy(scripts: Sequence[str] = (), *, live: bool = False) -> str:
    """Return the content security policy of a page; see `render_page` for the arguments."""
    hashes = " ".join(f"'{_hash(_read(name))}'" for name in (*_SCRIPTS, *scripts))
    rules = {
        "default-src": "'none'",
        "script-src": hashes,
        "style-src": f"'{_hash(_style())}'",
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        finalize=_escape_controls,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(_FILTERS)
    environment.globals["colours"] = COLOURS
    return environment


def _escape_controls(value: object) -> object:
    """Return a text with escapes for characters that can hide or reorder what a page shows."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    # Spaces that no line break replaces are used in numbers.
    return "".join(one if one in _SPACES else printable(one) for one in value)


def encode_texts(value: object) -> str:
    """Return a value as JSON whose texts show characters that could hide or reorder others.

    For everything that a page draws or inserts by a script, as `_escape_controls` is for templates.
    """
    return _SPECIAL.sub(_show_special, msgspec.json.encode(value).decode())


def _show_special(match: re.Match[str]) -> str:
    character: str = msgspec.json.decode(f'"{match[0]}"')
    shown = str(_escape_controls(character))
    return match[0] if shown == character else shown.replace("\\", r"\\")


def _encode(data: PageData) -> str:
    text = encode_texts(data)
    for character, escape in _ESCAPED.items():
        text = text.replace(character, escape)
    return text


@cache
def _read(name: str) -> str:
    return files("goodput_replay.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    return "\n".join(_read(name) for name in _STYLES)


def _hash(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _mark_safe(text: str) -> Markup:
    """Mark an asset of this package, or encoded JSON, as markup."""
    return Markup(text)  # noqa: S704 - see above
