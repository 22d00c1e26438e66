"""Ask the target what it serves, before the first request: a wrong target costs one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from goodput_core.contract import MODEL_OWNER, PATH_MODELS
from goodput_core.errors import UnreachableError, UsageError
from goodput_replay.sending.client.answer import error_sentence
from goodput_replay.sending.client.reason import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_replay.sending.target import Target

__all__ = ["ModelNames", "Served", "ask", "choose_models"]

_PATIENCE_S: Final = 10.0
_MAX_BYTES: Final = 1 << 20
_SHOWN_MODELS: Final = 5


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a target serves.

    Args:
        models: names, in the target's order.
        ours: whether all of them are served by our engine, which takes lengths in a header.
    """

    models: tuple[str, ...]
    ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """Which model to ask for.

    Args:
        by_name: the served name for a name in the trace.
        other: for every name that `by_name` does not have; None: there is none.
    """

    by_name: Mapping[str, str]
    other: str | None

    def __call__(self, name: str) -> str:
        """The name to send."""
        found = self.by_name.get(name, self.other)
        return name if found is None else found


async def ask(session: aiohttp.ClientSession, target: Target) -> Served:
    """Read the target's list of models.

    Raises:
        UnreachableError: it refused, hung, or answered something else; says what.
    """
    url = f"{target.url}{PATH_MODELS}"
    try:
        async with asyncio.timeout(_PATIENCE_S):
            async with session.get(url, allow_redirects=False) as response:
                body = b""
                while len(body) <= _MAX_BYTES and (piece := await response.content.readany()):
                    body += piece
    except TimeoutError as error:
        raise UnreachableError(
            f"{url}: no answer within {_PATIENCE_S:g} s; is the server ready?"
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise UnreachableError(
            f"{url}: could not connect ({reason_of(error)}); is the server running there?"
        ) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise UnreachableError(
            f"{url}: not an HTTP answer ({reason_of(error)}); check --target"
        ) from error
    if response.status in {401, 403}:
        raise UnreachableError(
            f"{url}: HTTP {response.status}, access refused; give a key with --api-key-env"
        )
    location = response.headers.get("Location")
    if location is not None and 300 <= response.status < 400:
        raise UnreachableError(
            f"{url}: HTTP {response.status}, a redirect to {' '.join(location.split())[:200]}; "
            "give the address it leads to as --target"
        )
    if response.status != 200:
        said = error_sentence(body)
        raise UnreachableError(
            f"{url}: HTTP {response.status}{f' ({said})' if said else ''}; "
            "is this an OpenAI server?"
        )
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreachableError(
            f"{url}: answered {response.content_type} that is no list of models; "
            "is this an OpenAI server?"
        ) from error
    if not models:
        raise UnreachableError(f"{url}: the target serves no model; wait until one is loaded")
    return Served(
        models=tuple(model.id for model in models),
        ours=all(model.owned_by == MODEL_OWNER for model in models),
    )


def choose_models(
    served: Served, *, asked: Mapping[str, str], only: str | None, in_trace: Iterable[str]
) -> ModelNames:
    """Decide which model each row asks for, so that no row can fail for its name.

    Args:
        served: what the target serves.
        asked: `--model TRACE=SERVED`.
        only: `--model SERVED`, for all other rows.
        in_trace: the names in the trace; an empty one is a row that names none.

    Raises:
        UsageError: a name that the target does not serve; names both sides.
    """
    shown = ", ".join(served.models[:_SHOWN_MODELS])
    for name in (*asked.values(), *(() if only is None else (only,))):
        if name not in served.models:
            raise UsageError(f"--model: the target serves no {name!r}; it serves {shown}")
    other = only
    if other is None and len(served.models) == 1:
        other = served.models[0]
    for name in in_trace:
        if name not in asked and other is None and name not in served.models:
            named = f"a model {name!r}" if name else "no model"
            raise UsageError(
                f"the trace names {named} and the target serves {shown}; choose with "
                "--model SERVED or --model TRACE=SERVED"
            )
    return ModelNames(by_name=dict(asked), other=other)
