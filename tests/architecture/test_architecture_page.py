"""Every path in docs/architecture.md exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:core|traces|engine|replay|operator)/[\w./]+)`", PAGE)))
# In the drawings, `…` stands for the import package; other paths are relative to the last one.
DRAWN = re.findall(r"(?<![\w/])(core|engine|replay|operator)/…/([\w/]+\.py)", PAGE)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_the_page_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("package", "path"), DRAWN)
def test_a_path_of_the_drawings_exists(package: str, path: str) -> None:
    assert (ROOT / package / f"goodput_{package}" / path).is_file()


def test_a_short_path_of_the_drawings_exists_in_the_engine() -> None:
    drawings = "\n".join(re.findall(r"```\n(.*?)```", PAGE, flags=re.DOTALL))
    short = re.findall(
        r"(?<![\w/…])((?:router|scheduler|kv|executor|openai|core)/[\w/]+\.py)", drawings
    )
    assert len(short) > 5
    missing = [path for path in short if not (ROOT / "engine/goodput_engine" / path).is_file()]
    assert missing == []


def test_the_page_is_one_page() -> None:
    assert len(PAGE.splitlines()) < 120
    assert len(PATHS) > 20
