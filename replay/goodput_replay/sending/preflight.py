"""Check the target before the run: served models, and one probe request per class.

A wrong URL, model, key or parameter is reported before any request is recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from goodput_core.contract import MODEL_OWNER, PATH_MODELS
from goodput_core.errors import UnreachableError, UsageError
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_S
from goodput_replay.plan import PromptKey
from goodput_replay.runs.length_pinning import LengthPinning
from goodput_replay.sending.client.chunks import error_sentence
from goodput_replay.sending.client.reason import reason_of
from goodput_replay.sending.client.redaction import Redaction

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import PlannedRequest
    from goodput_replay.sending.body import RequestRenderer
    from goodput_replay.sending.client.request import RequestClient
    from goodput_replay.sending.prompts import PromptRenderer
    from goodput_replay.sending.target import Target

__all__ = [
    "PROBE_TIMEOUT_NS",
    "ModelNames",
    "ServedModels",
    "choose_models",
    "choose_pinning",
    "join_models",
    "list_models",
    "make_probe",
    "send_probes",
]

_TIMEOUT_S: Final = 10.0
PROBE_TIMEOUT_NS: Final = 10 * NS_PER_S
_PROBE_TOKENS: Final = 8
_HINTS: Final[dict[int | None, str]] = {
    401: "give a key with --api-key-env or --header",
    403: "give a key with --api-key-env or --header",
    404: "check --model, --endpoint and --target",
}
_HINT: Final = (
    "check --model and --endpoint; --tokenizer sends no token ids, and --length-pinning none no "
    "extension parameters"
)
_REDIRECTED: Final = "redirects are not followed, so give the final address with --target"
# Statuses of a request with a parameter that the target does not accept.
_INVALID_STATUS: Final = frozenset({400, 422})
_UNUSABLE: Final = frozenset({Deviation.NOT_STREAMED, Deviation.COMPRESSED})
_MAX_BYTES: Final = 1 << 20
_SHOWN_MODELS: Final = 5
_COMPARED_PROMPTS: Final = 3


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """Maps a model name of the trace to the model name to send.

    Args:
        mapping: names to send by the name in the trace.
        default: name to send for all other requests; None for the name in the trace.
    """

    mapping: Mapping[str, str]
    default: str | None

    def __call__(self, name: str) -> str:
        """Return the model name to send."""
        return self.mapping.get(name, name if self.default is None else self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """Models served by a target.

    Args:
        models: model names, in the target's order.
        goodput: True if Goodput engines, which read lengths from a header, serve all of them.
    """

    models: tuple[str, ...]
    goodput: bool


async def list_models(
    session: aiohttp.ClientSession,
    target: Target,
    *,
    stated: Collection[str] = (),
    redaction: Redaction | None = None,
) -> ServedModels:
    """Read the target's list of models.

    Args:
        session: session of the run.
        target: the target.
        stated: model names on the command line, which replace the list of a target that responds
            without one.
        redaction: masks secrets that the server quotes; None if no header has one.

    Raises:
        UnreachableError: the connection failed or timed out, or the response is not a list of
            models.
    """
    url = f"{target.url}{PATH_MODELS}"
    mask = (redaction or Redaction()).mask
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async with session.get(url, allow_redirects=False) as response:
                body = b""
                while len(body) <= _MAX_BYTES and (piece := await response.content.readany()):
                    body += piece
    except TimeoutError as error:
        raise UnreachableError(
            f"{url}: no response within {_TIMEOUT_S:g} s; is the server ready?"
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise UnreachableError(
            f"{url}: could not connect ({reason_of(error)}); is the server running there?"
        ) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise UnreachableError(
            f"{url}: not an HTTP response ({reason_of(error)}); check --target"
        ) from error
    if response.status in {401, 403}:
        raise UnreachableError(
            f"{url}: HTTP {response.status}, access denied; give a key with --api-key-env"
        )
    location = response.headers.get("Location")
    if location is not None and 300 <= response.status < 400:
        where = mask(" ".join(location.split())[:200])
        raise UnreachableError(
            f"{url}: HTTP {response.status}, a redirect to {where}; "
            "give the address it leads to as --target"
        )
    models: list[_Model] = []
    if response.status != 200:
        message = mask(error_sentence(body))
        problem = (
            f"HTTP {response.status}{f' ({message})' if message else ''}; is this an "
            "OpenAI-compatible server? (with --model it needs no list)"
        )
    else:
        problem = "the target serves no model; wait until one is loaded"
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            problem = (
                f"the response ({response.content_type}) is not a list of models; is this an "
                "OpenAI-compatible server?"
            )
    if not models:
        if not stated:
            raise UnreachableError(f"{url}: {problem}")
        return ServedModels(models=tuple(stated), goodput=False)
    return ServedModels(
        models=tuple(model.id for model in models),
        goodput=all(model.owned_by == MODEL_OWNER for model in models),
    )


def join_models(served: Mapping[str, ServedModels]) -> ServedModels:
    """Return the models that every target serves.

    Args:
        served: models by the URL of the target.

    Raises:
        UsageError: the targets have no model in common.
    """
    (url, first), *others = served.items()
    common = list(first.models)
    for other_url, other in others:
        common = [name for name in common if name in other.models]
        if not common:
            one, two = (", ".join(m.models[:_SHOWN_MODELS]) for m in (first, other))
            raise UsageError(
                f"--target: {url} serves {one}, and {other_url} serves {two}; give targets with "
                "the same model"
            )
    return ServedModels(
        models=tuple(common), goodput=all(models.goodput for models in served.values())
    )


def choose_models(
    served: ServedModels,
    *,
    mapping: Mapping[str, str],
    default: str | None,
    in_trace: Iterable[str],
) -> ModelNames:
    """Return the map from a model name of the trace to the model name to send.

    Args:
        served: models of the target.
        mapping: `--model TRACE=SERVED`.
        default: `--model SERVED`, for the rows that `mapping` does not map; None if not given.
        in_trace: model names in the trace; empty for rows without a name.

    Raises:
        UsageError: the target does not serve a requested name.
    """
    shown = ", ".join(served.models[:_SHOWN_MODELS])
    for name in (*mapping.values(), *(() if default is None else (default,))):
        if name not in served.models:
            raise UsageError(f"--model: the target does not serve {name!r}; its models: {shown}")
    if default is None and len(served.models) == 1:
        default = served.models[0]
    for name in in_trace:
        if name not in mapping and default is None and name not in served.models:
            requests = f"with the model {name!r}" if name else "without a model"
            raise UsageError(
                f"the trace has requests {requests}, and the target serves {shown}; choose one "
                "with --model SERVED or --model TRACE=SERVED"
            )
    return ModelNames(mapping=dict(mapping), default=default)


def choose_pinning(option: LengthPinning | None, served: ServedModels) -> LengthPinning:
    """Return how output lengths are pinned.

    Args:
        option: `--length-pinning`; None to choose by the target.
        served: the served models.

    Raises:
        UsageError: the target cannot pin lengths in this way.
    """
    if option is None:
        return LengthPinning.HEADER if served.goodput else LengthPinning.MAX_TOKENS
    if option is LengthPinning.HEADER and not served.goodput:
        raise UsageError(
            "--length-pinning header: the target is not a Goodput engine and would ignore the "
            "header; use max-tokens"
        )
    return option


def make_probe(planned: PlannedRequest) -> PlannedRequest:
    """Return a short request like `planned`: same class, model and targets, one output token."""
    name = f"probe-{planned.slo_class}" if planned.slo_class else "probe"
    return replace(
        planned,
        request_id=name,
        scheduled_ns=0,
        prompt=PromptKey(request_id=name, input_tokens=_PROBE_TOKENS),
        output_tokens=1,
        max_output_tokens=1,
        cancel_after_ns=None,
    )


async def send_probes(
    client: RequestClient,
    renderer: RequestRenderer,
    examples: Sequence[PlannedRequest],
    url: str,
    *,
    as_text: PromptRenderer | None,
    may_limit: bool,
) -> tuple[RequestRenderer, list[str]]:
    """Send one probe request per class; probes are not recorded and not judged.

    A 4xx status other than 408 and 429, and a response that is not streamed or is compressed, would
    apply to every request of the class, so they are errors. Other failures, such as 503 from a
    starting server, are warnings, unless the target accepts the same request with a text as its
    prompt, repeatedly, and never with token ids.

    Args:
        client: client of the run's endpoint.
        renderer: renders the requests of the run.
        examples: the probes, one for each class.
        url: URL of the endpoint, for messages.
        as_text: renders text, if the prompts of the run are token ids; otherwise None.
        may_limit: True if outputs may be shorter than their rows on a target that requires it.

    Returns:
        The renderer, adapted to the target, and warnings: one for each adaptation and each of these
        other failures.

    Raises:
        UsageError: the target rejected a probe, whose message the error quotes, or does not stream,
            or does not accept token ids.
        UnreachableError: the target refused the connection.
    """
    adapted, records = await _adapt(client, renderer, examples, may_limit=may_limit)
    failed = next((r for r in records if r.outcome is Outcome.ERROR and r.status), None)
    if as_text is not None and failed is not None:
        text = replace(renderer, prompts=as_text)
        # A server that fails at random does not reject ids and accept text each time.
        for form, is_accepted in ((text, True), (renderer, False)) * _COMPARED_PROMPTS:
            _, (record, *_) = await _adapt(client, form, examples[:1], may_limit=may_limit)
            if (record.outcome is Outcome.OK) is not is_accepted:
                break
        else:
            raise UsageError(
                f"{url}: the target does not accept token ids as a prompt ({failed.detail}); give "
                "the tokenizer of its model with --tokenizer, or send text of approximate length "
                "with --prompt text"
            )
    warnings = []
    if adapted.uuids and not renderer.uuids:
        warnings.append(
            f"{url}: the target rejects the ids of the trace, so X-Request-Id is a UUID of each id"
        )
    if adapted.pinning is not renderer.pinning:
        warnings.append(
            f"{url}: the target rejects min_tokens and ignore_eos, so outputs are limited by "
            "max_tokens alone and may be shorter than their rows"
        )
    for record in records:
        of_class = f" of class {record.slo_class!r}" if record.slo_class else ""
        _require_accepted(record, url, of_class)
        if record.outcome is not Outcome.OK:
            warnings.append(
                f"the probe request{of_class} failed ({record.detail}); the run starts anyway"
            )
        elif Deviation.UNREADABLE_OUTPUT in record.deviations:
            warnings.append(
                f"{url}: the response to the probe request{of_class} reports output tokens, but "
                "has no text in a field of OpenAI's API; if all responses are like it, no first "
                "token can be measured, and the run is invalid"
            )
    return adapted, warnings


async def _adapt(
    client: RequestClient,
    renderer: RequestRenderer,
    examples: Sequence[PlannedRequest],
    *,
    may_limit: bool,
) -> tuple[RequestRenderer, list[RequestRecord]]:
    """Return the first form of the requests that the target does not reject, and its records.

    If it rejects every form, the form is the first one, and the records are the last ones, because
    the earlier ones may name a problem that a later form does not have. llama_cpp.server rejects
    a request id that is not a UUID, and `transformers serve` rejects parameters that OpenAI's API
    does not have.
    """
    forms = [renderer, replace(renderer, uuids=True)]
    if may_limit and renderer.pinning is LengthPinning.MAX_TOKENS:
        forms += [replace(form, pinning=LengthPinning.LIMIT) for form in forms]
    for form in forms:
        now_ns = time.monotonic_ns()
        records = await asyncio.gather(*(client.run(form.render(one), now_ns) for one in examples))
        if not any(record.status in _INVALID_STATUS for record in records):
            return form, records
    return renderer, records


def _require_accepted(record: RequestRecord, url: str, of_class: str) -> None:
    status = record.status
    failed = {Outcome.ERROR, Outcome.UNSENT}
    if status is None and record.outcome in failed and record.sent_ns is None:
        raise UnreachableError(f"{url}: the probe request{of_class} was not sent ({record.detail})")
    if not _UNUSABLE.isdisjoint(record.deviations):
        raise UsageError(
            f"{url}: the target did not stream the probe request{of_class}: {record.detail}; "
            'a replay needs a target that supports "stream": true, without compression'
        )
    if record.client_error:
        redirected = status is not None and status < 400
        hint = _REDIRECTED if redirected else _HINTS.get(status, _HINT)
        raise UsageError(
            f"{url}: the target rejects requests{of_class}: {record.detail}; {hint}, or skip this "
            "probe with --no-probe"
        )
