"""`replay`: parse the arguments and run the command; heavy modules are imported after parsing."""

from __future__ import annotations

from goodput_replay.arguments import make_parser, parse_options

__all__ = ["main", "make_parser"]


def main(argv: list[str]) -> int:
    """Replay a trace, rebuild a run's report, or search for the highest sustained rate.

    Args:
        argv: the arguments after `replay`.

    Returns:
        0 for a complete and valid run, 3 for an invalid one; with `--gate` the verdict's code.

    Raises:
        GoodputError: the run could not start, or ended early.
    """
    if argv[:1] == ["report"]:
        from goodput_replay.report.command import main as report  # noqa: PLC0415

        return report(argv[1:])
    if argv[:1] == ["capacity"]:
        from goodput_replay.sweep.capacity import main as capacity  # noqa: PLC0415

        return capacity(argv[1:])
    options = parse_options(argv)
    from goodput_replay.runner import run  # noqa: PLC0415 - loads numpy and pyarrow

    return run(options, argv)
