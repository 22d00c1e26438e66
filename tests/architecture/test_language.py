"""The language check rejects the excluded wording and accepts its replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tools import check_language
from tools.check_language import check

if TYPE_CHECKING:
    from pathlib import Path


def violations(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(check_language, "ROOT", folder)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return [violation.phrase for violation in check(path)]


@pytest.mark.parametrize(
    ("name", "text", "phrase"),
    [
        pytest.param("a.py", '"""What a step does."""\n', '"""What', id="headless summary"),
        pytest.param("a.py", 'x = 1\n"""Whether it is on."""\n', '"""Whether', id="field"),
        pytest.param("a.py", "# For nobody.\n", "nobody", id="comment"),
        pytest.param("a.py", "# A long line, and\n# no one whom.\n", "whom", id="second line"),
        pytest.param("a.py", "print('the request who waits')\n", "who", id="message"),
        pytest.param("a.py", "print(f'{1} has told it')\n", "told", id="f-string"),
        pytest.param("a.py", "class FloorPlan: ...\n", "FloorPlan", id="class"),
        pytest.param("saying.py", "", "saying", id="module"),
        pytest.param("a.py", "def test_nobody_waits(): ...\n", "nobody", id="test"),
        pytest.param("a.md", "It is what is\nasked for.\n", "what is asked", id="over two lines"),
        pytest.param("a.yaml", "a: 1  # 5 unless told\n", "told", id="yaml"),
        pytest.param("a.yaml", "# A long line, and\n  # no one whom.\n", "whom", id="yaml block"),
        pytest.param("a.go", "// a pod of ours\nfunc f() {}\n", "of ours", id="go"),
        pytest.param("a.go", "\t// it is what is\n\t// asked\n", "what is asked", id="go block"),
        pytest.param("a.go", 'err("it was told")\n', "told", id="go message"),
        pytest.param("a.tpl", "{{- /* the name it\nbears */ -}}\n", "bears", id="chart template"),
        pytest.param("a.j2", "<p>{{ told }}: {# a #}<b>bears</b></p>\n", "bears", id="page"),
        pytest.param("a.css", "a { b: c } /* told */\n", "told", id="css"),
        pytest.param("NOTES.txt", "{{ told }} is told\n", "told", id="notes"),
        pytest.param("Makefile", "a: b ## run as told\n", "told", id="makefile"),
        pytest.param("a.toml", 'a = "For whom it is"\n', "whom", id="toml"),
        pytest.param("a.py", "class PromiseKeeper: ...\n", "PromiseKeeper", id="promise"),
    ],
)
def test_rejected_wording_is_found(
    name: str, text: str, phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert violations(name, text, tmp_path, monkeypatch) == [phrase]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("a.py", '"""Return what `nobody` owns."""\n', id="quoted"),
        pytest.param("a.py", "x = 'told'\n", id="data"),
        pytest.param("a.py", "# None if the class has no target.\n", id="None"),
        pytest.param("a.py", "# People who run it.\n", id="people"),
        pytest.param("a.py", "# Try each in turn.\n", id="in turn"),
        pytest.param("a.py", "# As told.  language: ok\n", id="allowed"),
        pytest.param("a.md", "```\ntold\n```\n[a](told.md)\n", id="fence and link"),
        pytest.param("a.yaml", "told: a\n", id="yaml key"),
        pytest.param("a.go", "told := read(bears)\n", id="go code"),
        pytest.param("a.j2", "<p class='told'>{% if told %}</p>\n", id="tags"),
        pytest.param("a.py", "class PriorityLevel: ...\n", id="a word of the field"),
    ],
)
def test_accepted_wording_passes(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert violations(name, text, tmp_path, monkeypatch) == []


def test_every_folder_of_the_check_exists() -> None:
    names = (*check_language.FOLDERS, *check_language.PAGES)
    assert [name for name in names if not (check_language.ROOT / name).exists()] == []
