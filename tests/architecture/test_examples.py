"""The files in examples/ work with the commands in their comments, the docs and help texts."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from tests.builders.documented import documented_yaml

from goodput_core.completion import PARSERS_GROUP, command_parsers
from goodput_core.dispatch import run_command
from goodput_core.errors import SpecError
from goodput_core.spec.manifest import parse_manifest, read_manifest_text
from goodput_core.spec.support import require_servable

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
FOR_CLUSTERS = [
    path
    for path in sorted((ROOT / "examples").glob("*/*.yaml"))
    if "\nkind: LLMService\n" in path.read_text(encoding="utf-8")
]
SCHEMA_LINE = "# yaml-language-server: $schema=llmservice.schema.json\n"
PREVIEW = ["trace", "import", "--preview"]
# Replays of examples that are checked and not run.
DRY_RUN = ["replay", "--trace", "sample", "--dry-run"]
LOADED_BY = {
    "chat.yaml": [*DRY_RUN, "--emulate", "examples/chat.yaml"],
    "control.yaml": [
        *DRY_RUN, "--emulate", "examples/control.yaml", "--device", "examples/slow-device.yaml"
    ],
    "envoy-access-log.yaml": [
        *PREVIEW, "examples/envoy-access.log", "--map", "examples/envoy-access-log.yaml"
    ],
    "four.yaml": [*DRY_RUN, "--emulate", "examples/four.yaml"],
    "nginx-access-log.yaml": [
        *PREVIEW, "examples/nginx-access.log", "--map", "examples/nginx-access-log.yaml"
    ],
    "qwen.yaml": [
        *DRY_RUN, "--emulate", "examples/qwen.yaml", "--device", "llama-3-8b-h200"
    ],
    "slo.yaml": [*DRY_RUN, "--target", "http://127.0.0.1:9", "--slo", "examples/slo.yaml"],
    "smollm2.yaml": [
        "replay", "--rate", "6/m", "--duration", "2m", "--input-tokens", "64", "--output-tokens",
        "16", "--dry-run", "--emulate", "examples/smollm2.yaml", "--device", "llama-3-8b-h100"
    ],
    "slow-device.yaml": ["device", "show", "examples/slow-device.yaml"],
    "two-pools.yaml": [
        *DRY_RUN, "--emulate", "examples/chat.yaml", "--topology", "examples/two-pools.yaml"
    ],
}  # fmt: skip
# Files of the user: written by an earlier command, or named as an example.
USERS_OWN = {"mine.yaml", "new.yaml", "kubeconfig.yaml", "service.yaml", "values.yaml"}


def test_every_example_is_loaded_by_a_command() -> None:
    assert {path.name for path in EXAMPLES} == set(LOADED_BY)


@pytest.mark.parametrize("name", LOADED_BY)
def test_an_example_is_accepted(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert run_command(LOADED_BY[name]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", FOR_CLUSTERS, ids=lambda path: path.name)
def test_a_service_for_a_cluster_is_accepted(path: Path) -> None:
    require_servable(parse_manifest(read_manifest_text(path), source=path.name, yaml=yaml))


def test_the_page_about_other_servers_prints_the_manifest_that_it_applies() -> None:
    text = (ROOT / "examples" / "runtimes" / "vllm.yaml").read_text(encoding="utf-8")
    assert documented_yaml("runtimes.md", "kind: LLMService") == yaml.safe_load(text)


def test_a_cluster_refuses_the_folder_of_the_real_model() -> None:
    """ADR 37 has the reason."""
    text = read_manifest_text(ROOT / "examples/smollm2.yaml")
    with pytest.raises(SpecError, match=r"a folder of one machine, which pods cannot read; .*pvc"):
        require_servable(parse_manifest(text, source="smollm2.yaml", yaml=yaml))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_manifest_names_its_schema_and_the_commands_of_its_comment_parse(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if "kind: LLMService" in text:
        assert text.startswith(SCHEMA_LINE)
        assert (path.parent / "llmservice.schema.json").is_file()
    commands = re.findall(r"^#   ((?:goodput|replay) .*)$", text, flags=re.MULTILINE)
    assert commands
    parsers = command_parsers()
    for line in commands:
        program, *argv = shlex.split(line)
        name = argv.pop(0) if program == "goodput" else program
        parsers[name].parse_args(argv)


def mentioned() -> dict[str, set[str]]:
    """Return the YAML files that each help text and page mentions."""
    texts = {one.name: one.load()().format_help() for one in entry_points(group=PARSERS_GROUP)}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    texts |= {page.name: page.read_text(encoding="utf-8") for page in pages}
    pattern = re.compile(r"(?<![\w/.~-])(?:\.?\.?/)*[\w/-]+\.yaml\b")
    return {where: set(pattern.findall(text)) for where, text in texts.items()}


@pytest.mark.parametrize(
    ("where", "names"), [pytest.param(*item, id=item[0]) for item in mentioned().items()]
)
def test_a_mentioned_file_is_shipped(where: str, names: set[str]) -> None:
    missing = [
        name
        for name in names
        if Path(name).name not in USERS_OWN
        and not (ROOT / name.removeprefix("../")).is_file()
        and not (ROOT / "docs" / name).is_file()
    ]
    assert missing == []
