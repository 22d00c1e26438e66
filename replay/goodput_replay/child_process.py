"""`replay` in a child process that ends with its parent, also if the parent is killed.

Otherwise a killed `replay ab` would leave a replay behind, which keeps the target under load until
the end of its trace. The parent keeps the other end of the child's stdin open as long as it lives.
"""

from __future__ import annotations

import os
import signal
import threading

from goodput_core.dispatch import replay

__all__ = ["main"]


def main() -> None:
    """Run the command `replay`; stdin must be a pipe."""
    threading.Thread(target=_end_with_parent, name="watch-parent", daemon=True).start()
    replay()


def _end_with_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
