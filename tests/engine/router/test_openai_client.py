"""The `openai` package and the replayer as clients of a real router with two real engines."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING

import openai
import pytest
from tests.engine.router.conftest import started
from tests.replay.sending.builders import make_planned
from yarl import URL

from goodput_core.contract import HEADER_REPLICA, METRIC_TBT
from goodput_core.units import NS_PER_S
from goodput_engine.tokens import answer_text
from goodput_replay.sending.body import PreparedRequest
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.client.request import RequestClient, SendingPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def service() -> Iterator[dict[str, str]]:
    """The router's addresses, with two replicas behind it."""
    with ExitStack() as stack:
        engines = [started(stack, f"r{i}", "engine") for i in range(2)]
        options = [f"--upstream=r{i}={e['url']},{e['admin_url']}" for i, e in enumerate(engines)]
        router = started(stack, "router", "router", *options)
        ready = 0
        while ready < 2:
            try:
                with urllib.request.urlopen(
                    router["url"] + "/health/ready", timeout=10
                ) as response:
                    ready = json.load(response)["ready_replicas"]
            except urllib.error.HTTPError as error:
                error.close()
        yield router


def state(service: dict[str, str]) -> dict[str, dict[str, dict[str, int]]]:
    with urllib.request.urlopen(service["admin_url"] + "/control/state") as response:
        decoded: dict[str, dict[str, dict[str, int]]] = json.load(response)
        return decoded


def attained(service: dict[str, str], slo_class: str) -> int:
    return state(service)["outcomes"][slo_class]["attained"]


async def test_the_openai_client_streams_through_the_router(service: dict[str, str]) -> None:
    before = attained(service, "interactive")
    async with openai.AsyncOpenAI(base_url=service["url"] + "/v1", api_key="none") as client:
        models = await client.models.list()
        model = models.data[0].id
        assert (await client.models.retrieve(model)).id == model
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.models.retrieve("org/other")
        texts = []
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Say something."}],
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            texts += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        assert texts
        assert usage is not None
        assert usage.completion_tokens == 16
        completion = await client.completions.create(
            model=model, prompt="Say more.", max_tokens=8, extra_headers={"X-SLO-Class": "batch"}
        )
        assert completion.choices[0].text
        with pytest.raises(openai.BadRequestError, match="SLO class"):
            await client.completions.create(
                model=model, prompt="x", extra_headers={"X-SLO-Class": "none"}
            )
    assert attained(service, "interactive") == before + 1
    assert attained(service, "batch") == 1


async def test_both_replicas_serve_requests(service: dict[str, str]) -> None:
    async with openai.AsyncOpenAI(base_url=service["url"] + "/v1", api_key="none") as client:
        answers = [
            await client.completions.with_raw_response.create(
                model="chat", prompt="x", max_tokens=2
            )
            for _ in range(4)
        ]
    assert {response.headers[HEADER_REPLICA] for response in answers} == {"r0", "r1"}


def counted_gaps(service: dict[str, str]) -> float:
    """Return the number of times between tokens in the router's metrics."""
    with urllib.request.urlopen(service["admin_url"] + "/metrics") as response:
        page = response.read().decode()
    labels = r"\{.*slo_class=\"interactive\"\}"
    (count,) = re.findall(rf"(?m)^{METRIC_TBT}_count{labels} (\S+)$", page)
    return float(count)


@pytest.mark.parametrize(
    ("stop", "tokens"),
    [
        pytest.param(answer_text(1, 18) + " without an end", 24, id="text held back"),
        pytest.param(answer_text(1, 18), 19, id="text removed"),
    ],
)
async def test_router_and_replayer_time_each_token_whose_text_is_held_back(
    service: dict[str, str], stop: str, tokens: int
) -> None:
    before = counted_gaps(service)
    body = {"model": "chat", "prompt": "x", "max_tokens": 24, "stop": [stop], "stream": True}
    body["stream_options"] = {"include_usage": True}
    request = PreparedRequest(
        planned=make_planned(output_tokens=tokens),
        body=json.dumps(body).encode(),
        input_tokens=1,
        headers={"Content-Type": "application/json"},
    )
    async with open_session({}) as session:
        client = RequestClient(
            session,
            [URL(f"{service['url']}/v1/completions")],
            SendingPolicy(timeout_ns=60 * NS_PER_S, pinned=True),
        )
        record = await client.run(request, time.monotonic_ns())
    assert (record.output_tokens, record.deviations) == (tokens, ())
    assert len(record.gaps_us) == tokens - 1
    assert counted_gaps(service) - before == tokens - 1
