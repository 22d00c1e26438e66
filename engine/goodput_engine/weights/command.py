"""`goodput engine fetch`: fetch the weights of a manifest before an engine needs them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_core.cli import CommandParser
from goodput_core.errors import ExitCode, UsageError
from goodput_core.signals import watch_stop_requests
from goodput_engine.logs import configure_logging
from goodput_engine.manifest_file import read_manifest
from goodput_engine.server.model_options import (
    add_dtype_argument,
    add_model_path_argument,
    choose_model,
)
from goodput_engine.weights.fetch import fetch_weights

if TYPE_CHECKING:
    from goodput_core.signals import StopCause
    from goodput_engine.messages import ModelFolder

__all__ = ["main", "make_parser"]


def main(argv: list[str]) -> int:
    """Fetch the weights and print their folder.

    Returns:
        0, or the exit code of a stop request.

    Raises:
        GoodputError: the manifest is invalid or names no real model, or the weights cannot be
            fetched.
    """
    args = make_parser().parse_args(argv)
    service = read_manifest(args.manifest)
    model = choose_model(args, service.spec, source=str(args.manifest))
    if model is None:
        raise UsageError(
            f"goodput engine fetch: {args.manifest} emulates a device, which has no weights"
        )
    configure_logging()
    folder = model.path
    if model.source is not None:
        fetched = asyncio.run(_fetch(model, exit_with_parent=args.exit_with_parent))
        if isinstance(fetched, ExitCode):
            return fetched
        folder = fetched
    sys.stdout.write(f"{folder}\n")
    return ExitCode.PASS


def make_parser() -> CommandParser:
    """Build the parser of `goodput engine fetch`."""
    parser = CommandParser(
        prog="goodput engine fetch",
        summary="Fetch the weights of a real model into the cache, and print their folder.",
        examples=("goodput engine fetch -f examples/smollm2.yaml",),
    )
    parser.add_argument(
        "-f", "--file", required=True, type=Path, metavar="FILE", dest="manifest",
        help="manifest of the LLMService",
    )  # fmt: skip
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when stdin is closed")
    add_dtype_argument(parser)
    add_model_path_argument(parser)
    parser.set_defaults(device=None)
    return parser


async def _fetch(model: ModelFolder, *, exit_with_parent: bool) -> str | ExitCode:
    """Return the folder, or the exit code of a stop request."""
    assert model.source is not None
    causes: list[StopCause] = []
    fetch = asyncio.ensure_future(fetch_weights(model.source))

    def stop(cause: StopCause) -> None:
        causes.append(cause)
        fetch.cancel()

    watch_stop_requests(stop, exit_with_parent=exit_with_parent)
    try:
        return await fetch
    except asyncio.CancelledError:
        return causes[0].exit_code
