"""`goodput up` with the real engine and router on the emulated device."""

from __future__ import annotations

import json
import signal
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., Any]

UP = (sys.executable, "-m", "goodput_core", "up")


def complete(url: str, max_tokens: int = 4) -> dict[str, Any]:
    body = {"model": "chat", "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answered: dict[str, Any] = json.load(answer)
    return answered


def stream(url: str, max_tokens: int, first_token: Barrier) -> list[str]:
    body = {"model": "chat", "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body | options).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        events = [answer.readline().decode().strip()]
        first_token.wait()
        events += [line.decode().strip() for line in answer]
    return [event for event in events if event]


def serves(url: str) -> bool:
    try:
        return bool(complete(url)["usage"]["completion_tokens"] == 4)
    except urllib.error.HTTPError as error:
        error.close()
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_service_survives_the_loss_of_a_replica_and_of_a_core(
    start_up: Start,
) -> None:
    up = start_up(program=UP)
    ready = up.event("ready")
    assert complete(ready["url"])["usage"]["completion_tokens"] == 4
    first, second = psutil.Process(up.process.pid).children()[:2]
    (core,) = second.children()
    first.kill()
    assert up.event("replica_exited")["exit_code"] == -9
    assert complete(ready["url"])["usage"]["completion_tokens"] == 4
    up.event("replica_restarted")
    core.kill()
    core.wait(30)
    until(lambda: second.children() not in ([], [core]))  # the replica itself continues
    until(lambda: serves(ready["url"]))
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert up.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill-9", "ctrl-c"])
def test_no_process_outlives_up(start_up: Start, number: signal.Signals) -> None:
    up = start_up(program=UP)
    up.event("ready")
    assert len(up.members()) == 6, "up, router, and a front and a core per replica"
    up.signal(number)
    assert up.wait() == (130 if number is signal.SIGINT else -9)
    assert up.left_behind() == []


def test_running_requests_finish_after_ctrl_c(start_up: Start) -> None:
    up = start_up(program=UP)
    url = up.event("ready")["url"]
    first_tokens = Barrier(9, timeout=30)
    with ThreadPoolExecutor(max_workers=8) as pool:
        answers = [pool.submit(stream, url, 200, first_tokens) for _ in range(8)]
        first_tokens.wait()
        up.signal(signal.SIGINT)
        streams = [answer.result(timeout=30) for answer in answers]
    for events in streams:
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 200
    assert up.wait() == 130
    assert up.left_behind() == []


def test_an_unknown_profile_is_rejected_with_the_list_of_profiles(
    start_up: Start, tmp_path: Path
) -> None:
    chat = Path(__file__).parents[2] / "examples" / "chat.yaml"
    path = tmp_path / "mine.yaml"
    path.write_text(chat.read_text().replace("emulated://llama-3-8b-h100", "emulated://no-such"))
    up = start_up("-f", str(path), program=UP)
    assert up.wait() == 64
    (line,) = up.log().splitlines()
    assert line.startswith(
        f"error: {path}: spec.model.source: no device profile is called 'no-such'"
    )
    assert "llama-3-8b-h100" in line


def test_an_unknown_device_is_rejected_in_one_sentence(start_up: Start) -> None:
    up = start_up("--device", "no-such-device", program=UP)
    assert up.wait() == 64
    errors = [line for line in up.log().splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert "no-such-device" in errors[0]
    assert up.left_behind() == []


def test_a_rejected_manifest_is_named_by_the_users_path(start_up: Start, tmp_path: Path) -> None:
    chat = Path(__file__).parents[2] / "examples" / "chat.yaml"
    path = tmp_path / "mine.yaml"
    path.write_text(chat.read_text().replace("emulated://llama-3-8b-h100", "pvc://models/chat"))
    up = start_up("-f", str(path), program=UP)
    assert up.wait() == 64
    last = up.log().splitlines()[-1]
    assert last.startswith(f"error: {path}: spec.model.source")
    assert "llama-3-8b-h100" in last


def test_mode_recommend_decides_each_interval_and_changes_nothing(
    start_up: Start, tmp_path: Path
) -> None:
    chat = Path(__file__).parents[2] / "examples" / "chat.yaml"
    path = tmp_path / "chat.yaml"
    text = chat.read_text(encoding="utf-8").replace("replicas: 2", "minReplicas: 1", 1)
    path.write_text(
        text.replace("mode: Manual", "mode: Recommend\n    intervalSeconds: 1"), encoding="utf-8"
    )
    up = start_up("-f", str(path), program=UP)
    ready = up.event("ready")
    first = up.event("decision")["decision"]
    assert first["observation"]["traffic"]["signal"] == "missing", "the first reading"
    complete(ready["url"])
    arrived = 0
    while not arrived:
        decision = up.event("decision")["decision"]
        traffic = decision["observation"]["traffic"]
        assert traffic["signal"] == "fresh"
        arrived += traffic["arrivals"]
    assert arrived == 1
    (replica,) = decision["observation"]["replicas"]
    assert (replica["name"], replica["phase"], replica["signal"]) == ("chat-0", "ready", "fresh")
    assert decision["observation"]["device"]["kv_tokens"] > 0
    assert decision["observation"]["startups_ns"][0] > 0
    assert decision["apply_replicas"] == 1
    assert decision["replicas"]["reason"] in ("Steady", "UnknownCapacity", "Stabilizing")
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert not [event for event in up.seen if event["event"] == "change"]
