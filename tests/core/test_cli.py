"""The argument parser of all commands."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from goodput_core.cli import CommandParser, argument_type
from goodput_core.contract import DISTRIBUTION
from goodput_core.errors import ExitCode, UsageError
from goodput_core.units import parse_duration


@pytest.fixture
def parser() -> CommandParser:
    made = CommandParser(
        "goodput wait", summary="Wait for a run.", examples=["goodput wait --for 10s"]
    )
    made.add_argument("--for", dest="wait_ns", type=argument_type(parse_duration, "DURATION"))
    return made


def test_arguments_are_parsed(parser: CommandParser) -> None:
    assert parser.parse_args(["--for", "10s"]).wait_ns == 10_000_000_000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["--four", "10s"], "--four", id="unknown-option"),
        pytest.param(["--fo", "10s"], "--fo", id="abbreviated-option"),
        pytest.param(["--for"], "expected one argument", id="missing-value"),
        pytest.param(["--for", "soon"], "'soon' is not a duration", id="bad-value"),
        pytest.param(["--for", "-5s"], "'-5s' is negative; a duration is", id="negative"),
        pytest.param(["--for", "-.5m"], "'-.5m' is negative; a duration is", id="fraction"),
        pytest.param(["--for", "-5"], "'-5' is negative; a duration is", id="a number"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_64(
    parser: CommandParser, argv: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parser.parse_args(argv)
    assert caught.value.exit_code is ExitCode.USAGE
    assert message in str(caught.value)
    assert "goodput wait --help" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_choice_suggests_the_closest_one() -> None:
    parser = CommandParser("goodput trace")
    commands = parser.add_subparsers(metavar="COMMAND", prog=parser.prog)
    for name in ("import", "describe"):
        commands.add_parser(name)
    with pytest.raises(UsageError, match=r"invalid choice: 'descrbe'.*; did you mean describe\?;"):
        parser.parse_args(["descrbe"])
    with pytest.raises(UsageError) as caught:
        parser.parse_args(["xyz"])
    assert "did you mean" not in str(caught.value)


def test_the_version_is_that_of_the_distribution(
    parser: CommandParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"goodput {version(DISTRIBUTION)}\n"


def test_help_ends_with_examples(parser: CommandParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "Wait for a run." in printed
    assert printed.endswith("examples:\n  goodput wait --for 10s\n")
