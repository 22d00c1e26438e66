"""The command line of the operator: accepted and rejected options, and examples of its help."""

from __future__ import annotations

import shlex

import pytest

from goodput_core.errors import UsageError
from goodput_operator.manager.options import parse_options

IMAGES = ["--engine-image", "engine:1", "--router-image", "router:1"]


def test_the_default_is_all_namespaces() -> None:
    options = parse_options(IMAGES, {"HOSTNAME": "operator-0"})
    assert options.namespaces == ()
    assert options.kubeconfig is None
    assert options.identity.startswith("operator-0-")
    assert options.identity != parse_options(IMAGES, {"HOSTNAME": "operator-0"}).identity


def test_repeated_namespaces_are_kept_once() -> None:
    options = parse_options([*IMAGES, "--namespace", "b", "--namespace", "a", "--namespace", "b"])
    assert options.namespaces == ("b", "a")


@pytest.mark.parametrize(
    "line",
    [
        "--namespace ''",
        "--workers 0",
        "--fs-group -1",
        "--image-pull-policy Sometimes",
        "--workers 65",
        "--identity ''",
        f"--identity {'x' * 129}",
        "--probe-port 70000",
        "--pin-images ''",
        "--pin-images ftp://ghcr.io",
        "--pin-images ghcr.io/example",
        "--nonsense",
        "extra",
    ],
)
def test_an_invalid_option_is_rejected_in_one_sentence(line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options([*IMAGES, *shlex.split(line)])
    assert "goodput operator" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_registries_are_pinned_by_their_name_in_images() -> None:
    options = parse_options(
        [*IMAGES, "--pin-images", "ghcr.io", "--pin-images", "http://registry.ci:5000"]
    )
    assert options.installation.pinned_registries == {"ghcr.io", "registry.ci:5000"}
    assert options.registries == {
        "ghcr.io": "https://ghcr.io",
        "registry.ci:5000": "http://registry.ci:5000",
    }
    assert parse_options(IMAGES).installation.pinned_registries == frozenset()


def test_images_are_required_because_only_the_chart_knows_them() -> None:
    with pytest.raises(UsageError, match="--engine-image"):
        parse_options([])


def test_the_examples_of_the_help_can_be_parsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2].strip().splitlines()
    lines = [line for line in map(str.strip, examples) if line.startswith("goodput operator")]
    assert len(lines) == 2
    for line in lines:
        parse_options(shlex.split(line)[2:])


def test_the_identity_can_be_set() -> None:
    assert parse_options([*IMAGES, "--identity", "op_1"]).identity == "op_1"
