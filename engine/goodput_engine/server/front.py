"""What the front is at this moment: starting, serving, stopping or without a core.

The one mutable owner of the front's state; handlers ask it whether they may go on, and the
process's life cycle moves it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import structs

from goodput_engine.server.answered import AnsweredLengths
from goodput_engine.server.intake import Intake
from goodput_engine.server.prompt import PromptLimits
from goodput_engine.server.refusals import draining, engine_died, overloaded, starting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.core_client import CoreClient
    from goodput_engine.messages import Ready
    from goodput_engine.server.following import Followed
    from goodput_engine.server.refusals import Refusal
    from goodput_engine.server.settings import EngineSettings

__all__ = ["Front", "Phase"]


class Phase(StrEnum):
    """Where the process stands in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


class Front:
    """The front's state.

    Args:
        settings: of the replica.

    Attributes:
        phase: where the process stands.
        core: the running core; None before it is ready.
        ready: what the core said of itself; None before it is ready.
        intake: reads requests; None before the core is ready.
        configure: what the core runs, with what it has taken over of a changed manifest.
        startup_s: from the start of this process's work to a ready core, seconds.
        in_flight: requests being read or answered.
        answered: lengths of what was answered.
        epoch: of this start of the process: counters begin anew with each.
        idle: set while there are none.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.phase = Phase.STARTING
        self.core: CoreClient | None = None
        self.ready: Ready | None = None
        self.intake: Intake | None = None
        self.configure = settings.configure
        self.startup_s = 0.0
        self.in_flight = 0
        self.answered = AnsweredLengths()
        self.epoch = secrets.token_hex(8)
        self.idle = asyncio.Event()
        self.idle.set()
        self._rids = itertools.count(1)

    def serve(self, core: CoreClient, ready: Ready, *, startup_s: float) -> None:
        """Answer requests from now on."""
        self.core = core
        self.ready = ready
        self.startup_s = startup_s
        self.intake = Intake(
            model=self.settings.names.llmservice,
            slo=self.settings.followed.slo,
            limits=PromptLimits(
                vocab_size=ready.vocab_size,
                max_model_tokens=ready.max_model_tokens,
                block_size=ready.state.block_size,
            ),
        )
        self.phase = Phase.SERVING

    def follow(self, found: Followed) -> None:
        """Take over what has changed of the manifest: requests from now on are held to it."""
        assert self.intake is not None, "a manifest is followed once there is an intake"
        assert self.core is not None
        self.intake = replace(self.intake, slo=found.slo)
        self.configure = structs.replace(self.configure, **structs.asdict(found.core))
        self.core.follow_manifest(found.core)

    @property
    def draining(self) -> bool:
        """Whether nothing new is admitted because the process is to stop."""
        return self.phase is Phase.DRAINING

    def admitting(self) -> tuple[CoreClient, Intake]:
        """The core and the intake for a new request.

        Raises:
            Refusal: 503 or 429: not now.
        """
        core = self.serving()
        assert self.intake is not None
        if core.full:
            raise overloaded("the engine is behind with reading requests; try again later", 1)
        return core, self.intake

    def serving(self) -> CoreClient:
        """The core, while requests are served.

        Raises:
            Refusal: 503: they are not.
        """
        if self.phase is not Phase.SERVING:
            raise self.why_not()
        assert self.core is not None
        return self.core

    def why_not(self) -> Refusal:
        """Why nothing can be answered, or no longer."""
        if self.phase is Phase.STARTING:
            return starting()
        return draining() if self.draining else engine_died()

    def next_rid(self) -> int:
        """A number for a request."""
        return next(self._rids)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request while it is read and answered."""
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()
