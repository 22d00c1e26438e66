"""Conventions of all commands: `--version`, `-o` for `--out`, examples in the help."""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest

from goodput_core.completion import PARSERS_GROUP, command_parsers
from goodput_core.dispatch import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from below(one)


PARSERS = {one.prog: one for parser in command_parsers().values() for one in below(parser)}


def test_every_command_has_an_entry_point_and_a_parser() -> None:
    names = entry_points(group="goodput.commands").names
    assert {name.partition(".")[0] for name in names} == set(COMMANDS)
    parsers = {name.partition(".")[0] for name in entry_points(group=PARSERS_GROUP).names}
    assert parsers == set(COMMANDS)


@pytest.mark.parametrize("prog", PARSERS)
def test_a_command_has_its_version_and_examples(prog: str) -> None:
    parser = PARSERS[prog]
    assert "--version" in parser._option_string_actions
    assert parser.epilog
    assert "examples:\n" in parser.epilog
    assert parser.description


@pytest.mark.parametrize("prog", PARSERS)
def test_out_has_the_short_form_o(prog: str) -> None:
    options = PARSERS[prog]._option_string_actions
    assert options.get("-o") is options.get("--out")
