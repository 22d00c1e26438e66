"""Axes in the report's style, and an SVG that takes its colours from CSS.

matplotlib writes fixed colours, and the page has a light and a dark theme. Colours are therefore
drawn as placeholders, which are replaced by CSS variables in the SVG. pyplot is not used, because
its state is shared by the process.
"""

from __future__ import annotations

import hashlib
import io
import re
from typing import TYPE_CHECKING, Any, Final

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "Canvas", "colour_of", "percent_axis", "time_axis"]

COLOURS: Final = 8
"""Number of series colours: `--c0` … `--c7` of the style sheet."""

_INK: Final = "#f00d01"
_FAINT: Final = "#f00d02"
_ALERT: Final = "#f00d03"
_SERIES: Final = tuple(f"#f00d1{index}" for index in range(COLOURS))
_VARIABLES: Final = {
    _INK: "var(--ink)",
    _FAINT: "var(--faint)",
    _ALERT: "var(--alert)",
    **{placeholder: f"var(--c{index})" for index, placeholder in enumerate(_SERIES)},
}
_STYLE: Final[dict[Any, Any]] = {
    # Text is not converted to paths: it is selectable, searchable and in the font of the page.
    "svg.fonttype": "none",
    # Element names are hashes; with a fixed salt, equal runs give equal bytes.
    "svg.hashsalt": "goodput",
    "font.size": 9.5,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.45,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
}
_SIZE_INCHES: Final = (6.4, 3.0)
# Steps between time ticks, seconds.
_TIME_STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200)
_MOST_TIME_TICKS: Final = 8
# Start of an axis of shares, and the step between its ticks.
_SHARE_AXES: Final = ((0.95, 0.01), (0.9, 0.02), (0.8, 0.05), (0.5, 0.1), (0.0, 0.25))
_ID: Final = re.compile(r' id="([^"]*)"')
_REFERENCE: Final = re.compile(r"(?<=[\"(])#([A-Za-z0-9_-]+)")


def colour_of(index: int) -> str:
    """Return the placeholder of a series' colour, `--c{index}` on the page."""
    return _SERIES[index % COLOURS]


class Canvas:
    """Axes to draw on: a context manager around all drawing; call `svg` afterwards.

    Args:
        title: description of the drawing for screen readers.
        y_label: quantity and unit of the vertical axis.
    """

    ink: Final = _INK
    alert: Final = _ALERT

    def __init__(self, title: str, *, y_label: str) -> None:
        self._title = title
        self._context = rc_context(_STYLE)
        self._y_label = y_label
        self._figure: Figure | None = None

    def __enter__(self) -> Axes:
        self._context.__enter__()
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_ylabel(self._y_label)
        axes.margins(x=0)
        self._figure = figure
        return axes

    def __exit__(self, *error: object) -> None:
        self._markup = self._draw() if error[0] is None else ""
        self._context.__exit__(None, None, None)

    def svg(self) -> str:
        """Return the drawing as markup for an HTML page."""
        return self._markup

    def _draw(self) -> str:
        assert self._figure is not None, "the context was entered"
        sink = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self._figure.savefig(sink, format="svg", metadata=nothing)
        return _adapt_to_page(sink.getvalue(), self._title)


def time_axis(axes: Axes, length_s: float) -> None:
    """Label the horizontal axis with the time since the start of the window, in round steps.

    Args:
        axes: axes with seconds on the horizontal axis.
        length_s: length of the window.
    """
    step = next((s for s in _TIME_STEPS if length_s / s <= _MOST_TIME_TICKS), _TIME_STEPS[-1])
    axes.set_xlim(0, length_s)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _format_clock(value)))
    unit = "h:min:s" if length_s >= 3600 else "min:s"
    axes.set_xlabel(f"time since the start of the window ({unit})")


def percent_axis(axes: Axes, lowest: float) -> None:
    """Scale the vertical axis from a round share to 100 %.

    Args:
        axes: axes with a share from 0 to 1 on the vertical axis.
        lowest: lowest share in the drawing.
    """
    start, step = next((s for s in _SHARE_AXES if lowest > s[0]), _SHARE_AXES[-1])
    margin = (1 - start) * 0.03
    axes.set_ylim(start - margin, 1 + margin)
    axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.4g}%"))


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _adapt_to_page(markup: str, title: str) -> str:
    """Remove the header of a stand-alone file, add a label, and replace colours by variables."""
    body = markup[markup.index("<svg") :]
    opening, _, rest = body.partition(">")
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None, "matplotlib always writes a viewBox"
    # Ids must be unique on a page with many drawings; ids without a reference are removed.
    used = set(_REFERENCE.findall(rest))
    prefix = hashlib.blake2s(rest.encode(), digest_size=4).hexdigest()
    rest = _ID.sub(lambda at: f' id="f{prefix}-{at[1]}"' if at[1] in used else "", rest)
    rest = _REFERENCE.sub(rf"#f{prefix}-\1", rest)
    for placeholder, variable in _VARIABLES.items():
        rest = rest.replace(placeholder, variable)
    # The font of the page replaces that of matplotlib, whose notation depends on the version.
    rest = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", rest)
    rest = re.sub(r" ?font-family: [^;\"]*;?", "", rest)
    return f'<svg {box[0]} role="img" aria-label="{_escape(title)}">{rest}'


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
