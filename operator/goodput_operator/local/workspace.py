"""The fleet's private folder: a copy of the manifest, and the router's file of upstreams.

Children read the copy, so a manifest that is edited while the service runs cannot give a
restarted replica other settings than its neighbours have.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_core.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_operator.local.snapshot import Upstream

__all__ = ["Workspace", "open_workspace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Paths of one running fleet.

    Args:
        manifest: the copy that children read.
        upstreams: the router's file.
    """

    manifest: Path
    upstreams: Path

    def publish(self, upstreams: tuple[Upstream, ...]) -> None:
        """Replace the router's file of upstreams."""
        write_atomically(self.upstreams, json.dumps([asdict(u) for u in upstreams]).encode())


@contextmanager
def open_workspace(service: str, manifest_name: str, manifest_text: str) -> Iterator[Workspace]:
    """A folder that only this user can read, removed at the end."""
    with tempfile.TemporaryDirectory(prefix=f"goodput-{service}-") as folder:
        root = Path(folder)
        workspace = Workspace(manifest=root / manifest_name, upstreams=root / ".upstreams.json")
        workspace.manifest.write_text(manifest_text, encoding="utf-8")
        workspace.publish(())
        yield workspace
