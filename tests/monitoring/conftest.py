"""The alerting rules as a file for promtool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml
from tools.monitoring.alerts import make_rules

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="package")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(make_rules(runbooks="https://example.com")), encoding="utf-8")
    return path
