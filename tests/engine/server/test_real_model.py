"""`goodput engine` on a tiny random model: token ids over HTTP, compared with `generate`."""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from tests.builders.http import PATIENCE_S
from tests.builders.torch_models import CONTEXT, VOCABULARY, Outputs, make_folder
from tests.engine.conftest import EngineStarter
from tests.engine.executor.torch.test_loading import pickle_weights

from goodput_engine.messages import ExecutorInput, Submit

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from tests.engine.conftest import RunEngine, RunningEngine, StartEngine

pytestmark = pytest.mark.torch

URL = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return make_folder(tmp_path_factory.mktemp("tiny"), "Llama")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> Outputs:
    """The model's own outputs."""
    return Outputs(folder, "float64")


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine whose KV cache is too small for all requests of a test."""
    engines = EngineStarter(tmp_path_factory.mktemp("engine"))
    yield engines.start(
        # An option takes the place of the manifest's field.
        *("--block-size", "4", "--threads", "1", "--max-model-tokens", "97"),
        source=f"file://{folder}",
        realModel={"dtype": "float64", "blockSize": 16, "kvBlocks": 24},
        preemption="swap",
        swapSpaceGib=1,
        prefillChunkTokens=5,
    )
    engines.close()


def prompt_of(seed: int, length: int) -> list[int]:
    stream = random.Random(seed)
    return [stream.randrange(VOCABULARY) for _ in range(length)]


def body_of(prompt: list[int], **fields: Any) -> dict[str, Any]:
    greedy = {"model": "chat", "prompt": prompt, "max_tokens": Outputs.max_tokens, "temperature": 0}
    return greedy | fields


def expected_output(
    outputs: Outputs, prompt: list[int], *, ignore_eos: bool = False
) -> tuple[list[int], str]:
    options = ExecutorInput(token_ids=prompt, ignore_eos=ignore_eos)
    submit = Submit(
        rid=0,
        arrival_ns=0,
        input_tokens=len(prompt),
        max_output_tokens=Outputs.max_tokens,
        executor=options,
    )
    return outputs.of(submit)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            yield event


def core_of(engine: RunningEngine) -> psutil.Process:
    (core,) = psutil.Process(engine.process.pid).children()
    return core


@asynccontextmanager
async def requests_at_once(engine: RunningEngine, count: int) -> AsyncIterator[None]:
    """Let the core compute the requests of a block only after all of them have arrived."""
    core = core_of(engine)
    core.suspend()
    waiting = asyncio.ensure_future(engine.state_when(lambda state: state["in_flight"] == count))
    waiting.add_done_callback(lambda _: core.resume())
    try:
        yield
    finally:
        waiting.cancel()


async def run_until(
    engine: RunningEngine, core: psutil.Process, condition: Callable[[dict[str, Any]], bool]
) -> None:
    """Let a suspended core run for some milliseconds at a time, until its state meets a condition.

    The core is suspended when this returns, so it has computed little more, however busy the
    machine is.
    """
    async with asyncio.timeout(PATIENCE_S):
        while not condition(await engine.state()):
            core.resume()
            time.sleep(0.003)  # noqa: ASYNC251 - another task would let the core run for longer
            core.suspend()


async def test_concurrent_requests_get_the_tokens_of_generate(
    engine: RunningEngine, outputs: Outputs
) -> None:
    prompts = [prompt_of(seed, 3 * seed + 1) for seed in range(14)]

    async def stream(http: aiohttp.ClientSession, prompt: list[int]) -> tuple[list[int], str]:
        ids: list[int] = []
        reason, usage = "", {}
        body = body_of(prompt, stream=True, stream_options={"include_usage": True})
        async with http.post(URL, json=body) as response:
            assert response.status == 200
            async for event in events(response):
                if not event["choices"]:
                    usage = event["usage"]
                    continue
                (choice,) = event["choices"]
                assert choice["text"] == ""
                ids += choice["token_ids"]
                reason = choice["finish_reason"] or reason
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(ids))
        return ids, reason

    async def whole(http: aiohttp.ClientSession, prompt: list[int]) -> tuple[list[int], str]:
        async with http.post(URL, json=body_of(prompt, ignore_eos=True)) as response:
            answer = await response.json()
            assert response.status == 200, answer
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
        return choice["token_ids"], choice["finish_reason"]

    async with aiohttp.ClientSession(engine.url) as http:
        async with requests_at_once(engine, len(prompts)):
            streamed = await asyncio.gather(*(stream(http, prompt) for prompt in prompts))
        async with requests_at_once(engine, len(prompts)):
            complete = await asyncio.gather(*(whole(http, prompt) for prompt in prompts))
    for at, prompt in enumerate(prompts):
        assert streamed[at] == expected_output(outputs, prompt)
        assert complete[at] == expected_output(outputs, prompt, ignore_eos=True)
    state = await engine.state()
    assert state["preemptions"] > 0
    assert state["swapped_tokens"] > 0
    assert state["tokenizer"] == "model"
    assert (state["device"]["dtype"], state["device"]["threads"]) == ("float64", 1)
    assert (state["kv_total_blocks"], state["block_size"]) == (24, 4)


async def test_a_client_that_disconnects_frees_the_blocks(engine: RunningEngine) -> None:
    async with aiohttp.ClientSession(engine.url) as http:
        body = body_of(prompt_of(1, 30), stream=True, max_tokens=60, ignore_eos=True)
        async with http.post(URL, json=body) as response:
            await anext(events(response))
        # Leaving the block closed the connection during the stream.
    state = await engine.state_when(lambda state: not state["in_flight"] and not state["running"])
    assert state["kv_free_blocks"] == state["kv_total_blocks"]
    assert state["output_tokens"] > 0


async def test_a_client_that_disconnects_during_its_prompt_frees_the_blocks(
    engine: RunningEngine,
) -> None:
    core = core_of(engine)
    during_the_prompt = 0
    async with aiohttp.ClientSession(engine.url) as http:
        for seed in range(20):
            before = (await engine.state())["output_tokens"]
            core.suspend()
            # Eighteen chunks of five tokens, of which no prefix is cached.
            body = body_of(prompt_of(100 + seed, 90), max_tokens=6, ignore_eos=True)
            request = asyncio.ensure_future(http.post(URL, json=body))
            await run_until(
                engine,
                core,
                lambda state: state["kv_free_blocks"] < state["kv_total_blocks"] or request.done(),  # noqa: B023
            )
            request.cancel()
            await engine.state_when(lambda state: not state["in_flight"])
            core.resume()
            state = await engine.state_when(lambda state: not state["running"])
            assert state["kv_free_blocks"] == state["kv_total_blocks"]
            during_the_prompt += state["output_tokens"] == before
            if during_the_prompt == 3:
                break
    assert during_the_prompt == 3, "each prompt was complete before its client disconnected"


BAD_REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a text": ({"prompt": "hello"}, "prompt", "the model's folder has no tokenizer; send a list"),
    "a list with a text": ({"prompt": ["hello"]}, "prompt", "no tokenizer"),
    "no token": ({"prompt": []}, "prompt", "prompt has no tokens; send at least one"),
    "an id outside the vocabulary": (
        {"prompt": [1, 2, VOCABULARY, 4, VOCABULARY + 1]},
        "prompt",
        f"prompt[2] is the token id {VOCABULARY}; this model's token ids are below {VOCABULARY}",
    ),
    "a negative id": ({"prompt": [3, -1]}, "prompt", "$[1]"),
    "an id of 40 digits": ({"prompt": [10**40]}, "prompt", "$[0]"),
    "a fraction": ({"prompt": [1.5]}, "prompt", "$[0]"),
    "longer than the context": (
        {"prompt": [1] * 1000},
        "prompt",
        "this model's context of 97 must hold",
    ),
    "an output beyond the context": ({"max_tokens": 95}, "max_tokens", "context of 97 leaves 94"),
    "a stop string": ({"stop": "x"}, "stop", "stop needs text, and the model's folder has no"),
    "a format": (
        {"response_format": {"type": "json_object"}},
        "response_format",
        "response_format needs text, and the model's folder has no tokenizer; leave it out",
    ),
    "a temperature of 3": ({"temperature": 3}, "temperature", "expected `float` <= 2.0"),
    "a top-k of -2": ({"top_k": -2}, "top_k", "expected `int` >= -1"),
    "a repetition penalty of 0": ({"repetition_penalty": 0}, "repetition_penalty", ">= 0.01"),
    "a seed of 65 bits": ({"seed": 1 << 64}, "seed", "expected `int` <= 9223372036854775807"),
    "a stop id outside the vocabulary": (
        {"stop_token_ids": [VOCABULARY]},
        "stop_token_ids",
        f"stop_token_ids has the token id {VOCABULARY}",
    ),
    "too many stop ids": ({"stop_token_ids": [1] * 129}, "stop_token_ids", "length <= 128"),
    "a bias outside the vocabulary": (
        {"logit_bias": {str(VOCABULARY): 1}},
        "logit_bias",
        f"logit_bias has the token id {VOCABULARY}",
    ),
    "a bias of a text": ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias"),
    "a large bias": ({"logit_bias": {"1": 101}}, "logit_bias", "<= 100.0"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_a_bad_request_is_refused_while_others_run(
    engine: RunningEngine, outputs: Outputs, case: str
) -> None:
    fields, param, part = BAD_REQUESTS[case]
    prompt = prompt_of(2, 9)
    async with aiohttp.ClientSession(engine.url) as http:
        good = asyncio.ensure_future(http.post(URL, json=body_of(prompt)))
        async with http.post(URL, json={**body_of([1, 2, 3]), **fields}) as response:
            answer = await response.json()
        async with await good as other:
            (choice,) = (await other.json())["choices"]
    assert choice["token_ids"] == expected_output(outputs, prompt)[0]
    assert response.status == 400, answer
    assert answer["error"]["param"] == param
    assert part in answer["error"]["message"]


async def choice_of(engine: RunningEngine, **fields: Any) -> tuple[list[int], str]:
    body = body_of(prompt_of(3, 9), **fields)
    async with aiohttp.ClientSession(engine.url) as http, http.post(URL, json=body) as response:
        assert response.status == 200
        (choice,) = (await response.json())["choices"]
    return choice["token_ids"], choice["finish_reason"]


async def test_the_seed_of_a_request_decides_its_output(engine: RunningEngine) -> None:
    free = {"temperature": 1.5, "ignore_eos": True}
    first = await choice_of(engine, **free, seed=7)
    assert await choice_of(engine, **free, seed=7, top_p=1, top_k=-1) == first
    assert await choice_of(engine, **free, seed=8) != first
    others = [await choice_of(engine, **{**free, "temperature": None}) for _ in range(3)]
    assert len({tuple(ids) for ids, _ in others}) > 1, "the default temperature is 1"


async def test_options_change_a_greedy_output(engine: RunningEngine) -> None:
    ids, _ = await choice_of(engine, ignore_eos=True)
    banned = ids[4]
    without, _ = await choice_of(engine, ignore_eos=True, logit_bias={str(banned): -100})
    at = ids.index(banned)
    assert without[:at] == ids[:at]
    assert banned not in without
    stopped = await choice_of(engine, ignore_eos=True, stop_token_ids=[banned])
    assert stopped == (ids[: at + 1], "stop")
    penalised, _ = await choice_of(engine, ignore_eos=True, frequency_penalty=2, temperature=0)
    assert len(set(penalised)) >= len(set(ids))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_log_probabilities_are_those_of_a_pass_over_the_whole_output(
    engine: RunningEngine, outputs: Outputs, stream: bool
) -> None:
    """The engine samples from float32, and the reference is computed in float64."""
    prompts = [prompt_of(seed, 2 * seed + 1) for seed in range(14)]
    options = {"temperature": 1, "repetition_penalty": 1.3, "ignore_eos": True, "logprobs": 3}

    async def call(http: aiohttp.ClientSession, prompt: list[int]) -> dict[str, list[Any]]:
        body = body_of(prompt, **options, seed=len(prompt), stream=stream)
        found: dict[str, list[Any]] = {}
        async with http.post(URL, json=body) as response:
            assert response.status == 200, await response.text()
            answers = (
                [event async for event in events(response)] if stream else [await response.json()]
            )
        for answer in answers:
            (choice,) = answer["choices"]
            assert not stream or len(choice["token_ids"]) == 1
            assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
            for name, values in {"ids": choice["token_ids"], **choice["logprobs"]}.items():
                found.setdefault(name, []).extend(values)
        return found

    before = (await engine.state())["preemptions"]
    async with aiohttp.ClientSession(engine.url) as http, requests_at_once(engine, len(prompts)):
        answers = await asyncio.gather(*(call(http, prompt) for prompt in prompts))
    assert (await engine.state())["preemptions"] > before
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = answer["ids"]
        assert len(ids) == Outputs.max_tokens
        assert answer["tokens"] == [f"token_id:{one}" for one in ids]
        expected = outputs.logprobs([*prompt, *ids])[len(prompt) - 1 : -1]
        for at, row in enumerate(expected):
            assert answer["token_logprobs"][at] == pytest.approx(float(row[ids[at]]), abs=1e-5)
            top = row.topk(3).indices.tolist()
            names = {f"token_id:{one}": float(row[one]) for one in {*top, ids[at]}}
            assert answer["top_logprobs"][at] == pytest.approx(names, abs=1e-5)


async def test_a_prompt_of_a_million_tokens_is_refused(engine: RunningEngine) -> None:
    body = io.BytesIO(json.dumps(body_of([1] * 1_000_000)).encode())
    async with aiohttp.ClientSession(engine.url) as http, http.post(URL, data=body) as response:
        assert response.status == 413  # larger than the body of any prompt of this context


async def test_a_chat_without_a_tokenizer_names_the_remedy(engine: RunningEngine) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == "messages"
    assert error["message"].endswith("no tokenizer; send token ids to /v1/completions")


async def test_sigterm_ends_the_engine_after_its_running_streams(
    start_engine: StartEngine, folder: Path, outputs: Outputs
) -> None:
    engine = start_engine("--dtype", "float64", "--threads", "1", source=f"file://{folder}")
    core = core_of(engine)
    prompts = [prompt_of(seed, 3 * seed + 1) for seed in range(6)]

    async def stream(http: aiohttp.ClientSession, prompt: list[int]) -> tuple[list[int], str]:
        ids: list[int] = []
        reason = ""
        async with http.post(URL, json=body_of(prompt, stream=True, ignore_eos=True)) as response:
            async for event in events(response):
                (choice,) = event["choices"]
                ids += choice["token_ids"]
                reason = choice["finish_reason"] or reason
        return ids, reason

    core.suspend()
    async with aiohttp.ClientSession(engine.url) as http:
        streams = [asyncio.ensure_future(stream(http, prompt)) for prompt in prompts]
        await engine.state_when(lambda state: state["in_flight"] == len(prompts))
        await run_until(engine, core, lambda state: state["output_tokens"] > 0)
        engine.process.terminate()
        await engine.state_when(lambda state: state["draining"])
        assert not any(one.done() for one in streams)
        async with http.post(URL, json=body_of(prompts[0])) as rejected:
            assert (await rejected.json())["error"]["code"] == "draining"
        core.resume()
        answers = await asyncio.gather(*streams)
    assert answers == [expected_output(outputs, one, ignore_eos=True) for one in prompts]
    assert engine.wait() == 0


async def test_a_killed_core_ends_streams_with_an_error(
    start_engine: StartEngine, folder: Path
) -> None:
    engine = start_engine(source=f"file://{folder}")
    core = core_of(engine)
    body = body_of([1, 2, 3], stream=True, max_tokens=100, ignore_eos=True)
    core.suspend()
    async with aiohttp.ClientSession(engine.url) as http:
        request = asyncio.ensure_future(http.post(URL, json=body))
        await run_until(engine, core, lambda state: state["output_tokens"] > 0)
        async with await request as response:
            await response.content.readline()
            await http.get("/health/live")  # the HTTP process still responds
            core.kill()
            rest = (await response.content.read()).decode()
    assert rest.splitlines()[-2].startswith('data: {"error":'), rest
    assert '"code":"engine_died"' in rest
    assert "[DONE]" not in rest
    await engine.state_when(lambda state: state["phase"] == "serving" and state["in_flight"] == 0)
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post(URL, json=body_of([1, 2, 3], max_tokens=3)) as response,
    ):
        assert response.status == 200
        assert (await response.json())["usage"]["prompt_tokens"] == 3
    assert "core restarted" in engine.stderr()


def refused(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 64, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: dict[str, tuple[Callable[[Path], object], tuple[str, ...], str]] = {
    "half a download": (
        cut_weights,
        (),
        "download the model again: model.safetensors has ",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), (), "config.json cannot be read"),
    "a long context": (
        lambda _: None,
        ("--max-model-tokens", "129"),
        f"its context has {CONTEXT} tokens, so the limit must be 1 to {CONTEXT}, not 129",
    ),
    "fewer blocks than a request needs": (
        lambda _: None,
        ("--kv-blocks", "7"),
        ": 7 KV blocks of 16 tokens hold 112 tokens, too few for one request; the memory must hold",
    ),
    "more blocks than memory": (
        lambda _: None,
        ("--kv-blocks", "99999999"),
        ": 99999999 KV blocks take 381.5 GiB, but only ",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_model_that_cannot_be_served_is_refused_in_one_sentence(
    run_engine: RunEngine, tmp_path: Path, case: str
) -> None:
    change, options, part = BROKEN[case]
    folder = make_folder(tmp_path / "model", "Llama")
    change(folder)
    assert part in refused(run_engine(*options, source=f"file://{folder}"))


async def test_pickled_weights_are_served_only_with_the_option(
    start_engine: StartEngine, run_engine: RunEngine, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "model", "Llama")
    pickle_weights(folder)
    source = f"file://{folder}"
    assert "add --allow-pickle-weights" in refused(run_engine(source=source))
    engine = start_engine("--allow-pickle-weights", "--kv-blocks", "20", source=source)
    assert (await engine.state())["device"]["pickle_weights"] == "allowed"
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post(URL, json=body_of([1, 2, 3], max_tokens=3)) as response,
    ):
        assert response.status == 200


async def test_a_limited_context_and_measured_memory_are_published(
    start_engine: StartEngine, folder: Path
) -> None:
    engine = start_engine("--max-model-tokens", "64", source=f"file://{folder}")
    state = await engine.state()
    assert state["max_model_tokens"] == 64
    # All 256 sequences of 64 tokens fit into this machine's memory, and more are never needed.
    assert state["kv_total_blocks"] == 256 * 64 // 16
    parts = [state["device"][name] for name in ("load_seconds", "warm_up_seconds")]
    assert min(parts) > 0
    assert state["startup_seconds"] > sum(parts)
    kernel = state["device"]["attention"]
    assert kernel in {"torch-flex", "torch-sdpa"}
    assert f"attention={kernel}" in engine.stderr()
