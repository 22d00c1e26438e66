"""The state of the HTTP process: starting, serving, restarting, draining or failed.

`ServerState` is the only owner of this state. The handlers check it before they admit a request,
and the process's lifecycle changes it.
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

from goodput_core.histogram import LengthHistogram
from goodput_engine import tokens
from goodput_engine.openai.errors import overloaded, unavailable
from goodput_engine.openai.sampling_fields import OPENAI_DEFAULTS
from goodput_engine.request_bodies import MemoryLimit
from goodput_engine.server.requests import PromptLimits, RequestParser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.core_client import CoreConnection
    from goodput_engine.messages import Ready
    from goodput_engine.openai.errors import APIError
    from goodput_engine.server.manifest_watch import FollowedFields
    from goodput_engine.server.settings import EngineSettings
    from goodput_engine.text.tokenizer import ModelTokenizer

__all__ = ["ServerPhase", "ServerState"]


class ServerPhase(StrEnum):
    """Phases of a replica's lifecycle."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


class ServerState:
    """The state of one replica's HTTP process.

    Args:
        settings: settings of the replica.
        number: number of the process among those that serve the port. The first one, 0, leads: it
            alone sends limits and changes of the manifest to the core.

    Attributes:
        phase: the current phase.
        core: the running core; None before it is ready, and after its death.
        ready: the report of the last core that was ready; None before the first one is.
        parser: validates requests; None before the core is ready.
        tokenizer: tokenizer of a real model; None without one.
        defaults: values of the sampling fields that a request leaves out.
        configure: the core's configuration, updated by changes of the manifest.
        limits: limits that replace those of `configure`; None before any change.
        restarts: number of cores that were ready after the first one.
        retry_after_s: expected time until a restarted core is ready.
        startup_s: seconds from the start of the process until the core was ready.
        in_flight: number of requests that are being read or served.
        reading: number of requests that are admitted but not yet submitted to the core.
        lengths: lengths of the finished requests.
        bodies: memory limit for request bodies that are being read.
        epoch: random id of this core; a new epoch means that all counters restarted at 0.
        idle: set while `in_flight` is 0.
        submitted: set while `reading` is 0.
    """

    def __init__(self, settings: EngineSettings, *, number: int = 0) -> None:
        self.settings = settings
        self._leads = number == 0
        self.phase = ServerPhase.STARTING
        self.core: CoreConnection | None = None
        self.ready: Ready | None = None
        self.parser: RequestParser | None = None
        self.tokenizer: ModelTokenizer | None = None
        self.defaults = OPENAI_DEFAULTS
        self.configure = settings.configure
        self.limits = settings.limits
        self.restarts = 0
        self.retry_after_s = 1
        self.startup_s = 0.0
        self.in_flight = 0
        self.reading = 0
        self.lengths = LengthHistogram()
        self.bodies = MemoryLimit(settings.clients.all_bodies_bytes)
        self.epoch = secrets.token_hex(8)
        self.idle = asyncio.Event()
        self.idle.set()
        self.submitted = asyncio.Event()
        self.submitted.set()
        # The core finds the process of a request by its rid, modulo the number of processes.
        self._rids = itertools.count(number or settings.http_processes, settings.http_processes)
        self._followed = settings.followed

    @property
    def draining(self) -> bool:
        """True if no new request is admitted because the process stops."""
        return self.phase is ServerPhase.DRAINING

    @property
    def body_bytes(self) -> int:
        """Maximum size of a body: the general limit, or that of the model's context if smaller."""
        clients = self.settings.clients
        if self.ready is None:
            return clients.body_bytes
        of_context = clients.body_token_bytes * self.ready.max_model_tokens
        return min(clients.body_bytes, clients.body_base_bytes + of_context)

    def serve(self, core: CoreConnection, ready: Ready) -> None:
        """Start to admit requests."""
        self.core = core
        if self.ready is not None:
            self.restarts += 1
            if self._leads:
                # The manifest may have changed while the core started.
                core.send(self._followed.core)
        self.ready = ready
        if self.limits is not None and self._leads:
            core.send(self.limits)
        computes = self.configure.model is not None
        self.parser = RequestParser(
            model=self.settings.identity.llmservice,
            slo=self._followed.slo,
            limits=PromptLimits(
                vocab_size=ready.vocab_size,
                max_model_tokens=ready.max_model_tokens,
                block_size=ready.state.block_size,
            ),
            computes=computes,
            tokenizer=self.tokenizer if computes else tokens,
            defaults=self.defaults,
            grammar_problem=ready.grammar_problem,
        )
        self.phase = ServerPhase.SERVING

    def suspend(self) -> None:
        """Stop to admit requests after the core's death; its state and counters are lost."""
        self.phase = ServerPhase.RESTARTING
        self.core = None
        self.epoch = secrets.token_hex(8)
        self.lengths = LengthHistogram()

    def follow(self, fields: FollowedFields) -> None:
        """Apply a changed manifest to later requests, and to the core."""
        assert self.parser is not None, "the manifest is followed once the core is ready"
        self._followed = fields
        self.parser = replace(self.parser, slo=fields.slo)
        core = fields.core
        budget = min(max(self.configure.token_budget, core.min_token_budget), core.max_token_budget)
        self.configure = structs.replace(
            self.configure, **structs.asdict(core), token_budget=budget
        )
        if self.limits is not None:
            # The manifest's law replaces that of earlier limits.
            limits = structs.replace(self.limits.limits, budget_law=None)
            self.limits = structs.replace(self.limits, limits=limits)
        if self.core is not None and self._leads:
            self.core.send(core)

    def require_admission(self) -> RequestParser:
        """Return the parser for a new request.

        Raises:
            APIError: 503 or 429 if no request is admitted now.
        """
        core = self.require_core()
        assert self.parser is not None
        if core.full:
            raise overloaded("the engine core has too many unread requests; retry later", 1)
        return self.parser

    def core_of_admitted(self) -> CoreConnection:
        """Return the core for a request that was admitted, perhaps to an earlier core.

        Raises:
            APIError: 503 if the core died in the meantime.
        """
        if self.core is None:
            raise self.not_serving_error()
        return self.core

    def require_core(self) -> CoreConnection:
        """Return the core if it serves requests.

        Raises:
            APIError: 503 if it does not.
        """
        if self.phase is not ServerPhase.SERVING:
            raise self.not_serving_error()
        assert self.core is not None
        return self.core

    def not_serving_error(self) -> APIError:
        """Return the 503 of the current phase."""
        if self.phase is ServerPhase.STARTING:
            return unavailable("the engine is starting; retry in a moment", "starting")
        if self.draining:
            return unavailable("the engine is stopping; use another replica", "draining")
        if self.phase is ServerPhase.RESTARTING:
            return unavailable(
                "the engine core died and is restarting; retry later or use another replica",
                "engine_restarting",
                retry_after_s=self.retry_after_s,
            )
        return unavailable("the engine failed; use another replica", "engine_died")

    def lost_error(self) -> APIError:
        """Return the 503 of a request that was cut short, whatever the phase is now."""
        if self.draining:
            return self.not_serving_error()
        return unavailable("the engine core died during this request; retry it", "engine_died")

    def next_rid(self) -> int:
        """Return the next request number."""
        return next(self._rids)

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request in `in_flight`."""
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    @contextmanager
    def count_reading(self) -> Iterator[None]:
        """Count a request in `reading`."""
        self.reading += 1
        self.submitted.clear()
        try:
            yield
        finally:
            self.reading -= 1
            if not self.reading:
                self.submitted.set()
