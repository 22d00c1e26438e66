"""The tenants of a router: the tenant of each request, its admission, and counts by tenant.

Shares are those of this process: with several routers, or several processes of one, each divides
its own requests.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from goodput_core.contract import (
    CLIENT_OUTCOMES,
    LABEL_LLMSERVICE,
    LABEL_OUTCOME,
    LABEL_TENANT,
    METRIC_TENANT_OUTPUT_TOKENS,
    METRIC_TENANT_PROMPT_TOKENS,
    METRIC_TENANT_REQUESTS,
    METRIC_TENANT_THROTTLED,
    METRIC_TENANT_WEIGHT,
)
from goodput_core.tenants.admission import ServiceCapacity, TenantAdmission, TenantRequest
from goodput_core.tenants.tenant_list import (
    MAX_FILE_BYTES,
    OTHER_TENANTS,
    hash_key,
    parse_tenants,
)
from goodput_core.units import NS_PER_MS
from goodput_engine.api_keys import invalid_key, sent_key
from goodput_engine.openai.errors import APIError, overloaded
from goodput_engine.reloaded_file import ReloadedFile
from goodput_engine.router.proxied_request import ProxiedRequest, TenantWorkload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from multidict import MultiMapping
    from prometheus_client import CollectorRegistry

    from goodput_core.slo.targets import SLOClass

__all__ = ["Tenants", "read_workload"]

_MAX_NAMED: Final = 100
"""Tenants that have series of their own, the first ones of the file."""
_RETRY_AFTER_S: Final = 1
_MAX_PARSED_BYTES: Final = 4 << 20
_BYTES_PER_TOKEN: Final = 4
_MAX_OUTPUT_TOKENS: Final = 1 << 24
_MAX_PROBLEM: Final = 500


class _WorkFields(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


_WORK_FIELDS: Final = msgspec.json.Decoder(_WorkFields)


def read_workload(body: bytes) -> TenantWorkload:
    """Return the expected work of a request; of an invalid body, only its length is used."""
    estimate = TenantWorkload(prompt_tokens=len(body) // _BYTES_PER_TOKEN + 1)
    if len(body) > _MAX_PARSED_BYTES:
        return estimate
    try:
        fields = _WORK_FIELDS.decode(body)
    except (ValueError, RecursionError):
        return estimate
    tokens, prompt = estimate.prompt_tokens, bytes(fields.prompt)
    if prompt.startswith(b"[") and b'"' not in prompt:
        tokens = prompt.count(b",") + 1
    limit = fields.max_completion_tokens or fields.max_tokens
    if limit is not None:
        limit = max(1, min(limit * max(1, fields.n or 1), _MAX_OUTPUT_TOKENS))
    return TenantWorkload(tokens, limit, fields.stream is True)


class _TenantCounts:
    """The counts of one series of metrics."""

    __slots__ = ("outcomes", "output_tokens", "prompt_tokens", "throttled")

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(CLIENT_OUTCOMES, 0)
        self.throttled = 0
        self.prompt_tokens = 0
        self.output_tokens = 0


class Tenants(Collector):
    """The tenants of the file of `--tenants`.

    Args:
        path: the file; read again after each change.
        classes: the service's classes by name.
        registry: registry of the metrics.
        llmservice: the service's name.
        clock: returns monotonic nanoseconds.

    Raises:
        InputError: the file is unreadable or invalid.
    """

    def __init__(
        self,
        path: Path,
        *,
        classes: Mapping[str, SLOClass],
        registry: CollectorRegistry,
        llmservice: str,
        clock: Callable[[], int],
    ) -> None:
        self._file = ReloadedFile(
            path,
            parse_tenants,
            limit_bytes=MAX_FILE_BYTES,
            replaced="tenants replaced",
            kept="tenants not replaced",
            remedy="name a file of tenants, which `goodput tenants add` writes",
            clock=clock,
        )
        self._llmservice = llmservice
        self._admission = TenantAdmission(classes, {})
        self._running: set[ProxiedRequest] = set()
        self._counts: dict[str, _TenantCounts] = {}
        self._by_hash: dict[bytes, str] = {}
        self._replace()
        registry.register(self)

    def refresh(self) -> str:
        """Read the file again if it changed; return why its content is not in use, else nothing."""
        if self._file.refresh():
            self._replace()
        return self._file.problem[:_MAX_PROBLEM]

    def identify(self, headers: MultiMapping[str]) -> str:
        """Return the tenant of a request.

        Raises:
            APIError: 401 if the request has no key of a tenant.
        """
        self.refresh()
        given = sent_key(headers)
        digest = hash_key(given)
        # A client cannot choose the digest of its guess, so the time of a look-up reveals nothing.
        tenant = self._by_hash.get(digest) if given else None
        if tenant is None:
            raise invalid_key(given)
        return tenant

    @staticmethod
    def refuse_compressed(encodings: str) -> NoReturn:
        """Refuse a compressed body, whose length does not show the work of its request.

        Args:
            encodings: the request's `Content-Encoding`.

        Raises:
            APIError: 415.
        """
        raise APIError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding {encodings[:40]!r} is not supported by a service with tenants; "
            "send the body uncompressed",
            param="Content-Encoding",
            close=True,
        )

    def admit(
        self,
        request: ProxiedRequest,
        workload: TenantWorkload,
        capacity: ServiceCapacity,
        now_ns: int,
    ) -> None:
        """Admit a request, and count its use of the service until `settle`.

        Args:
            request: the request, with its tenant and class.
            workload: its expected work.
            capacity: the capacity of the replicas.
            now_ns: the current time.

        Raises:
            APIError: 429 if the service is overloaded, and the tenant has more than its share; 401
                if the tenant has been removed from the file.
        """
        tenant, admission = request.tenant, self._admission
        assert tenant is not None, "identified before"
        if not admission.knows(tenant):  # its keys were removed while the body arrived
            raise invalid_key(tenant)
        if admission.observation_due(now_ns):
            for other in self._running:
                self._observe(other, now_ns)
        use = TenantRequest(
            tenant=tenant,
            slo_class=request.slo.slo_class,
            prompt_tokens=workload.prompt_tokens,
            max_output_tokens=workload.max_output_tokens,
            streamed=workload.streamed,
        )
        if not admission.admit(use, capacity, now_ns):
            self._counts_of(tenant).throttled += 1
            raise overloaded(
                "the replicas are overloaded, and this API key has more than its share of them; "
                "retry later",
                _RETRY_AFTER_S,
            )
        request.tenant_request = use
        self._running.add(request)

    def note_sent(self, request: ProxiedRequest, replica: str, now_ns: int) -> None:
        """Record that a request is sent to a replica."""
        if request.tenant_request is not None:
            self._admission.send(request.tenant_request, replica, now_ns)

    def note_start(self, request: ProxiedRequest, now_ns: int) -> None:
        """Record that the response of a request begins."""
        observer = request.observer
        started = observer is not None and observer.first_ns is not None
        if started and request.tenant_request is not None:
            self._admission.start(request.tenant_request, now_ns)

    def settle(self, request: ProxiedRequest, outcome: str | None, now_ns: int) -> None:
        """Count the end of a request.

        Args:
            request: the request.
            outcome: its outcome; None after a client error.
            now_ns: the current time.
        """
        tenant = request.tenant
        if tenant is None:
            return
        counts = self._counts_of(tenant)
        if outcome is not None:
            counts.outcomes[outcome] += 1
        use = request.tenant_request
        if use is None:
            return
        self._running.discard(request)
        prompt, output = request.reported_tokens
        if output:
            prompt = prompt or use.prompt_tokens
        counts.prompt_tokens += prompt
        counts.output_tokens += output
        self._observe(request, now_ns)
        timings = request.timings
        ttft_ms = None if timings is None else timings.ttft_ms
        self._admission.end(
            use,
            prompt_tokens=prompt,
            output_tokens=output,
            now_ns=now_ns,
            ttft_ns=None if ttft_ms is None else ttft_ms * NS_PER_MS,
            tpot_ns=None if timings is None else request.tpot_ns,
        )

    def _observe(self, request: ProxiedRequest, now_ns: int) -> None:
        use, observer = request.tenant_request, request.observer
        if use is not None and observer is not None:
            paced = not request.reads_slowly
            self._admission.observe(use, observer.tokens, now_ns, paced=paced)

    def collect(self) -> Iterator[Metric]:
        """Part of prometheus_client's `Collector`."""
        self.refresh()
        service, labels = self._llmservice, (LABEL_LLMSERVICE, LABEL_TENANT)
        requests = CounterMetricFamily(
            METRIC_TENANT_REQUESTS,
            "Client requests of a tenant by outcome.",
            labels=(*labels, LABEL_OUTCOME),
        )
        throttled = CounterMetricFamily(
            METRIC_TENANT_THROTTLED,
            "Requests rejected because their tenant had more than its share.",
            labels=labels,
        )
        prompt = CounterMetricFamily(
            METRIC_TENANT_PROMPT_TOKENS,
            "Prompt tokens of served requests, estimated if they are not reported.",
            labels=labels,
        )
        output = CounterMetricFamily(
            METRIC_TENANT_OUTPUT_TOKENS, "Output tokens of served requests.", labels=labels
        )
        weight = GaugeMetricFamily(METRIC_TENANT_WEIGHT, "Weight of a tenant.", labels=labels)
        for name, counts in self._counts.items():
            for outcome, count in counts.outcomes.items():
                requests.add_metric((service, name, outcome), count)
            throttled.add_metric((service, name), counts.throttled)
            prompt.add_metric((service, name), counts.prompt_tokens)
            output.add_metric((service, name), counts.output_tokens)
        for tenant in self._file.content:
            if tenant.name in self._counts:
                weight.add_metric((service, tenant.name), tenant.weight)
        yield from (requests, throttled, prompt, output, weight)

    def _replace(self) -> None:
        """Use the content of the file."""
        tenants = self._file.content
        self._by_hash = {digest: t.name for t in tenants for digest in t.hashes}
        self._admission.set_weights({t.name: t.weight for t in tenants})
        # A series never moves to another name, since counters must not fall. That of a removed
        # tenant ends; its last responses count as those of other tenants.
        kept = {tenant.name for tenant in tenants} | {OTHER_TENANTS}
        self._counts = {name: counts for name, counts in self._counts.items() if name in kept}
        for tenant in tenants:
            if len(self._counts) - (OTHER_TENANTS in self._counts) >= _MAX_NAMED:
                break
            self._counts.setdefault(tenant.name, _TenantCounts())

    def _counts_of(self, tenant: str) -> _TenantCounts:
        counts = self._counts.get(tenant)
        return self._counts.setdefault(OTHER_TENANTS, _TenantCounts()) if counts is None else counts
