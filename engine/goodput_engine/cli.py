"""Entry points of the engine's commands; each imports only the modules of its command."""

from __future__ import annotations

__all__ = ["device", "engine", "router"]


def engine(argv: list[str]) -> int:
    """`goodput engine`: one serving replica, `goodput engine bench` or `goodput engine fetch`."""
    if argv[:1] == ["bench"]:
        from goodput_engine.bench import main as bench  # noqa: PLC0415

        return bench(argv[1:])
    if argv[:1] == ["fetch"]:
        from goodput_engine.weights.command import main as fetch  # noqa: PLC0415

        return fetch(argv[1:])
    from goodput_engine.server.command import main  # noqa: PLC0415 - only this command's imports

    return main(argv)


def router(argv: list[str]) -> int:
    """`goodput router`: the router in front of replicas."""
    from goodput_engine.router.command import main  # noqa: PLC0415 - only this command's imports

    return main(argv)


def device(argv: list[str]) -> int:
    """`goodput device`: the device profiles."""
    from goodput_engine.device.command import main  # noqa: PLC0415 - only this command's imports

    return main(argv)
