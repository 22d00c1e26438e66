"""The link of torch's folder in a virtual environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tools.torch_packages import main, packages_folder

if TYPE_CHECKING:
    import pytest


def test_programs_recognize_the_linked_modules_as_installed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOODPUT_CACHE", str(tmp_path / "cache"))
    folder = packages_folder()
    folder.mkdir(parents=True)
    (folder / "complete").touch()
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    for _ in range(2):
        main(tmp_path / "venv")
        [link] = (packages / "goodput-torch.pth").read_text(encoding="utf-8").splitlines()
        # Hypothesis and others compare the path of a module with this name.
        assert Path(link).name == "site-packages"
        assert Path(link).samefile(folder)
