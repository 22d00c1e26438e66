"""A page is one file without a network, in which no text can become code."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from goodput_core.text import printable
from goodput_replay.report.figures import Figure, FigureSeries, FigureUnit, Mark, XAxis, numbers
from goodput_replay.report.page import PageData, encode_texts, policy, render_page

HOSTILE = "</script><script>alert(1)</script><!--\u2028\u2029&amp;\"'"


def _figure(text: str) -> Figure:
    series = FigureSeries(label=text, colour="c0", values=[1.0, None])
    return Figure(
        name="one", title=text, note=text, axis=XAxis.TIME, unit=FigureUnit.MS, x=[0, 1],
        series=[series], marks=[Mark(label=text, value=1, colour="c0")], when_empty=text,
    )  # fmt: skip


def _render(text: str, *, live: bool = False) -> str:
    # The base template is a page without contents.
    data = PageData(groups=[text], figures=[_figure(text)])
    return render_page("base.html.j2", title=text, data=data, context={}, live=live)


def _block(html: str) -> str:
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return str(block)


# The embeddings, overrides and isolates of bidirectional text, and their ends.
BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def _visible(text: str) -> str:
    """Return the text as a page shows it."""
    return "".join(one if one in "\n\t\xa0\u202f\u2009" else printable(one) for one in text)


@example(text=HOSTILE)
@example(text=f"a{BIDI}\x1b\x7f\\u202e\x08\n")
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_no_text_breaks_out_of_the_json_block(text: str) -> None:
    html = _render(text)
    block = _block(html)
    assert not re.search("[<>&\u2028\u2029]", block)
    assert json.loads(block)["groups"] == [_visible(text)]
    assert json.loads(block)["figures"][0]["series"][0]["label"] == _visible(text)
    assert html.count("<script") == html.count("</script>") == 3


def test_no_name_can_reorder_what_a_page_or_an_update_shows() -> None:
    html = _render(f"batch{BIDI}chat")
    assert not set(BIDI) & set(html)
    assert json.loads(_block(html))["groups"][0].startswith(r"batch\u202a\u202b")
    update = encode_texts({"data": PageData(groups=[BIDI], figures=[_figure(BIDI)])})
    assert not set(BIDI) & set(json.dumps(json.loads(update), ensure_ascii=False))


def test_the_policy_lists_every_script_and_style_by_its_hash() -> None:
    html = _render("x")
    (allowed,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    for kind in ("script", "style"):
        (listed,) = re.findall(rf"{kind}-src ([^;]*)", allowed.replace("&#39;", "'"))
        contents = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        assert contents
        hashes = [
            f"'sha256-{b64encode(sha256(one.encode()).digest()).decode()}'" for one in contents
        ]
        assert listed.split() == hashes


def test_a_page_may_request_nothing_and_a_live_page_only_its_own_server() -> None:
    rules = dict(rule.split(" ", 1) for rule in policy().split("; "))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    assert "unsafe" not in policy()
    assert policy(live=True) == policy().replace("connect-src 'none'", "connect-src 'self'")


def test_the_assets_have_no_external_references_and_no_inline_styles() -> None:
    html = _render("x")
    assert re.findall(r"\b(?:src|href|srcset|action)=\"([^\"]*)\"", html) == ["data:,"]
    assert "@import" not in html
    assert "url(" not in html
    assert " style=" not in re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), None),
        (0.0, 0),
        (12.0, 12),
        (0.9999874, 0.999987),
        (1234567.0, 1234570),
        (1 / 3, 0.333333),
    ],
)
def test_numbers_are_short_and_nan_is_null(value: float, shown: float | None) -> None:
    assert numbers([value]) == [shown]
