"""`goodput device`: the listings for terminals and for programs."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING

import pytest
import yaml

from goodput_core.dispatch import run_command
from goodput_core.errors import InputError, UsageError
from goodput_engine.cli import device
from goodput_engine.device.load import list_profiles, load_profile

if TYPE_CHECKING:
    from pathlib import Path


def test_every_shipped_profile_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert device(["list"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in list_profiles())
    assert device(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in listed] == list_profiles()
    assert listed[-1]["kv_tokens"] == 65_536


@pytest.mark.parametrize("name", list_profiles())
def test_a_profile_is_shown_with_every_number_and_where_it_is_from(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert device(["show", name]) == 0
    shown = capsys.readouterr().out
    assert all(number in shown for number in load_profile(name).provenance)
    assert device(["show", name, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["name"] == name
    assert facts["provenance"]


def test_control_characters_of_a_profile_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = files("goodput_engine.device") / "profiles" / "llama-3-8b-h100.yaml"
    profile = yaml.safe_load(shipped.read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(profile | {"description": "\x1b]0;owned\x07"}))
    assert device(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert r"\x1b]0;owned\x07" in shown


def test_numbers_are_shown_in_the_files_own_units(capsys: pytest.CaptureFixture[str]) -> None:
    device(["show", "llama-3-8b-h100"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    values = {row[0]: row[1] for row in rows if len(row) > 1}
    assert values["c0_ms"] == "5.993"
    assert values["c1_us_per_token"] == "29.52"
    assert values["kv_blocks"] == "26,674"
    assert values["swap_gb_per_s"] == "50"


def test_a_table_is_shown_as_one_and_an_illustrative_profile_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    device(["show", "published-70b-table"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["decodes", "+0", "+128", "+256", "+512", "+1024"] in lines
    assert ["32", "21", "72", "126", "237", "460"] in lines
    assert any(line[:1] == ["Illustrative:"] for line in lines)
    device(["show", "llama-3-8b-h100"])
    assert "Illustrative" not in capsys.readouterr().out
    device(["list", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in listed if row["illustrative"]] == ["published-70b-table"]


def test_text_of_a_users_profile_is_not_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ndescription: '[bold]mine[/nothing]'\nform: unit\noverlap: add\nnumbers:\n"
        + "".join(
            f"  {key}: {{value: 2, from: '[red]x'}}\n" for key in load_profile("unit").provenance
        ),
        encoding="utf-8",
    )
    assert device(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "[bold]mine[/nothing]" in shown
    assert "[red]x" in shown


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        pytest.param(["show", "nope"], InputError, id="an unknown profile"),
        pytest.param(["show", "/no/such.yaml"], InputError, id="no file"),
        pytest.param(["show"], UsageError, id="no name"),
        pytest.param(["remove"], UsageError, id="an unknown action"),
        pytest.param([], UsageError, id="no action"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(argv: list[str], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        device(argv)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("action", ["list", "show", "fit"])
def test_every_help_says_what_it_is_for_and_ends_in_examples(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["device", action, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"\nexamples:\n  goodput device {action}" in said
    assert said.index(".\n") < said.index("options:"), "a sentence before the options"
