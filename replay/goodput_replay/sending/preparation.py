"""Ask the targets what they serve and accept, and decide from it how the requests are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from yarl import URL

from goodput_replay.runs.length_pinning import LengthPinning
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.runs.summary import TargetSummary
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.client.redaction import Redaction
from goodput_replay.sending.client.request import RequestClient, SendingPolicy
from goodput_replay.sending.loop import SenderPlan
from goodput_replay.sending.preflight import (
    PROBE_TIMEOUT_NS,
    choose_models,
    choose_pinning,
    join_models,
    list_models,
    make_probe,
    send_probes,
)
from goodput_replay.sending.prompt_overhead import measure_overhead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import ClientSession
    from rich.console import Console

    from goodput_replay.plan import PlannedRequest
    from goodput_replay.run_plan import RunPlan
    from goodput_replay.sending.target import Target

__all__ = ["prepare_sending", "probe_targets"]

_PINNED: Final = frozenset({LengthPinning.HEADER, LengthPinning.MAX_TOKENS})


async def prepare_sending(
    plan: RunPlan,
    targets: Sequence[Target],
    session: ClientSession,
    warn: Callable[[str], None],
) -> tuple[SenderPlan, TargetSummary]:
    """Return how the requests of a run are sent, and the description of its targets.

    Args:
        plan: inputs of the run.
        targets: the running targets.
        session: session of the run.
        warn: called with each warning.

    Raises:
        UnreachableError: no valid response from a target.
        UsageError: a target cannot serve the plan.
    """
    options = plan.options
    stated = [*options.models.values(), *([options.model] if options.model else ())]
    redaction = Redaction.of(plan.headers.values())
    served = join_models(
        {
            target.url: await list_models(session, target, stated=stated, redaction=redaction)
            for target in targets
        }
    )
    names = choose_models(
        served, mapping=options.models, default=options.model, in_trace=plan.stats.models
    )
    pinning = choose_pinning(options.pinning, served)
    sender_plan = SenderPlan(
        requests=plan.requests,
        share=plan.share,
        urls=tuple(f"{target.url}{options.endpoint.path}" for target in targets),
        endpoint=options.endpoint,
        headers=plan.headers,
        ca_file=options.ca_file,
        policy=SendingPolicy(
            timeout_ns=options.timeout_ns,
            class_timeouts_ns=options.class_timeouts_ns,
            pinned=pinning in _PINNED,
            limited=pinning is LengthPinning.LIMIT,
            retries=options.retries,
            redaction=redaction,
        ),
        pinning=pinning,
        models=names,
        prompt=options.prompt,
        words=None if plan.tokenizer is None else plan.tokenizer.words,
        salt=plan.salt,
        concurrency=options.concurrency,
        causal=options.causal,
    )
    examples = [make_probe(example) for example in plan.stats.examples.values()]
    if options.probe:
        sender_plan = await _probe(
            sender_plan, examples, session, warn, may_limit=options.pinning is None
        )
    overhead_tokens = None
    if plan.tokenizer is not None:
        if options.probe:
            overhead_tokens = await measure_overhead(
                session,
                [URL(url) for url in sender_plan.urls],
                options.endpoint,
                model=names(examples[0].model_name),
                prompts=sender_plan.make_prompts(),
                warn=warn,
            )
        if overhead_tokens is None:
            overhead_tokens = plan.tokenizer.added_tokens
        sender_plan = replace(sender_plan, overhead_tokens=overhead_tokens)
    target_summary = TargetSummary(
        url=", ".join(target.url for target in targets),
        endpoint=options.endpoint.path,
        model=", ".join(dict.fromkeys(names(name) for name in plan.stats.models)),
        service=plan.service,
        pinning=sender_plan.pinning,
        prompt=options.prompt,
        prompt_overhead_tokens=overhead_tokens,
        header_names=tuple(plan.headers),
        streaming=True,
    )
    return sender_plan, target_summary


async def probe_targets(plan: RunPlan, console: Console) -> None:
    """Test the targets as before a run, without sending a request of the trace.

    Args:
        plan: inputs of the run.
        console: console on stderr, for warnings.

    Raises:
        UnreachableError: no valid response from a target.
        UsageError: a target cannot serve the plan.
    """

    def warn(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    async with open_session(plan.headers, plan.tls) as session:
        await prepare_sending(plan, plan.options.targets, session, warn)


async def _probe(
    plan: SenderPlan,
    examples: Sequence[PlannedRequest],
    session: ClientSession,
    warn: Callable[[str], None],
    *,
    may_limit: bool,
) -> SenderPlan:
    """Send one probe request per class to each target, and adapt the plan to the targets."""
    as_text = None
    if plan.prompt is PromptKind.TOKEN_IDS:
        as_text = replace(plan, prompt=PromptKind.INVENTED_WORDS).make_prompts()
    renderer = plan.make_renderer()
    policy = replace(plan.policy, timeout_ns=PROBE_TIMEOUT_NS, class_timeouts_ns={}, retries=0)
    for url in plan.urls:
        client = RequestClient(session, [URL(url)], policy)
        renderer, warnings = await send_probes(
            client, renderer, examples, url, as_text=as_text, may_limit=may_limit
        )
        for warning in warnings:
            warn(warning)
    policy = replace(
        plan.policy,
        pinned=renderer.pinning in _PINNED,
        limited=renderer.pinning is LengthPinning.LIMIT,
    )
    return replace(plan, policy=policy, pinning=renderer.pinning, uuids=renderer.uuids)
