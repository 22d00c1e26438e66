"""A chat template cannot use more time or memory than its process may have."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import UTC, datetime
from typing import Any

import psutil
import pytest

from goodput_core.errors import InputError, InternalError
from goodput_engine.text.chat_template import MAX_PROMPT_BYTES
from goodput_engine.text.template_process import TemplateProcess

CHAT = [
    {"role": role, "content": content}
    for role, content in [("user", "Hello"), ("assistant", "Hi"), ("user", "<b>ü</b>")]
]
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
# It ends for the first message only.
SOMETIMES = (
    "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


def start(source: str) -> TemplateProcess:
    return TemplateProcess(source, {"bos_token": "<s>", "eos_token": "</s>"}, now=lambda: NOON)


def _workers() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "goodput_engine.text.template_worker" in process.cmdline()
    ]


_EARLIER = set[int]()
"""Processes of tokenizers that other test files of this worker keep."""


@pytest.fixture(autouse=True)
def _note_earlier() -> None:
    _EARLIER.clear()
    _EARLIER.update(process.pid for process in _workers())


def children() -> list[psutil.Process]:
    return [process for process in _workers() if process.pid not in _EARLIER]


def memory_mib() -> int:
    return int(psutil.Process().memory_info().rss) >> 20


_NESTED = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}"
)
_DOUBLED = (
    "{% set n = namespace(x=?) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"
)


_NESTED_LIST = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for a in range(40) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(_NESTED, id="nested loops"),
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(40) }}",
            id="a macro that calls itself twice",
        ),
        pytest.param(
            "{% for a in [[]] recursive %}{{ loop([[], []]) }}{% endfor %}", id="a recursive loop"
        ),
        pytest.param("{{ 'a' * 10**12 }}", id="a long text"),
        pytest.param("{{ 9 ** (9 ** 9) }}", id="a large power"),
        pytest.param("{% for m in messages * 999999999 %}{% endfor %}", id="a long list"),
        pytest.param(
            "{% for a in range(90000) %}{{ 'abcdefgh' * 10000 }}{% endfor %}", id="a large output"
        ),
        pytest.param(_DOUBLED.replace("?", "'a' * 99").replace("+", "~"), id="a doubled text"),
        pytest.param(_DOUBLED.replace("?", "'a' * 99"), id="a doubled sum of texts"),
        pytest.param(_DOUBLED.replace("?", "[0]"), id="a doubled list"),
        pytest.param(
            "{% set n = namespace(x=[]) %}{% for a in range(90000) %}"
            "{% set n.x = n.x + ['abcdefgh' * 100000] %}{% endfor %}",
            id="many long texts",
        ),
        pytest.param("{{ messages | tojson(indent=999999999) }}", id="a large indent"),
        pytest.param("{{ 'a' | center(9999999999) }}", id="a wide filter"),
        pytest.param("{{ ['a'] | map('center', 9999999999) | list }}", id="a mapped filter"),
        pytest.param("{{ 'a'.ljust(9999999999) }}", id="a wide method"),
        pytest.param("{{ '{:>9999999999}'.format('a') }}", id="a wide format"),
        pytest.param("{{ '{:>{}}'.format('a', 9999999999) }}", id="a computed width"),
        pytest.param("{{ '%9999999999d' % 1 }}", id="a wide number"),
        pytest.param("{{ '%*d' | format(9999999999, 1) }}", id="a computed width of a number"),
        pytest.param("{{ [1] | batch(9999999999, 'a') | list }}", id="a wide batch"),
        pytest.param("{{ range(99999) | join('a' * 1048576) }}", id="a join"),
        pytest.param("{{ ('a' * 9999).replace('a', 'b' * 999999) }}", id="a replaced text"),
        pytest.param("{{ ('a' * 9999).translate({97: 'b' * 999999}) }}", id="a translated text"),
        pytest.param("{{ '\\t'.expandtabs(2147483647) }}", id="a wide tab"),
        pytest.param(
            "{% set n = namespace(x=999) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}"
            "{% endfor %}",
            id="squares",
        ),
        pytest.param("{{ lipsum(n=1000000000) }}", id="random words"),
        pytest.param(
            "{{ range(99999) | map('string') | map('list') | sum(start=[]) }}", id="a sum"
        ),
        pytest.param(_NESTED_LIST + "{{ n.x | tojson | length }}", id="JSON of a nested list"),
        pytest.param(_NESTED_LIST + "{{ n.x == n.y }}", id="equal lists"),
        pytest.param("{{a}}" * 190_000, id="a megabyte of expressions"),
        pytest.param("{% if a %}" + "{% elif b %}" * 80_000 + "{% endif %}", id="conditions"),
    ],
)
def test_an_endless_template_ends(source: str) -> None:
    began, before = time.monotonic(), memory_mib()
    with pytest.raises(InputError, match=r"chat template .*(fails|writes|invalid)") as error:
        start(source).render(CHAT)
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 30  # at most 7 s of processor time
    assert memory_mib() - before < 100


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ messages | tojson(indent='a' * 999999) }}", id="a long indent"),
        pytest.param("{{ 'a' * 67108864 }}", id="as much as is allowed"),
        pytest.param("{{ strftime_now('%Y' * 99999) }}", id="a long date"),
        pytest.param("{{ ('(' * 99999) | urlize }}", id="the start of many links"),
    ],
)
def test_a_large_prompt_is_bounded(source: str) -> None:
    prompt = start(source).render(CHAT)
    assert 99_999 <= len(prompt) <= MAX_PROMPT_BYTES


def test_a_longer_prompt_is_an_error() -> None:
    with pytest.raises(InputError, match="writes more than 67108864 bytes"):
        start("{{ 'a' * 67108863 }}ü").render(CHAT)


def test_another_process_takes_the_next_chat_after_one_that_was_ended() -> None:
    template = start(SOMETIMES)
    with pytest.raises(InputError, match="it takes more than 2 s of processor time"):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render([{"role": "user", "content": "hello"}]) == "hello"


def test_a_process_that_was_killed_between_two_chats_is_replaced() -> None:
    template = start(SOMETIMES)
    (child,) = children()
    child.kill()
    psutil.wait_procs([child], timeout=30)
    assert template.render(CHAT) == "Hello"


def test_a_process_that_is_killed_while_it_renders_is_no_error_of_the_client() -> None:
    template = start(SOMETIMES)
    (child,) = children()
    busy_s = child.cpu_times().user

    def kill_when_busy() -> None:
        while child.cpu_times().user < busy_s + 0.2:
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_when_busy)
    thread.start()
    with pytest.raises(InternalError, match="ended with the code -9; retry the request"):
        template.render([{"role": "user", "content": "loop"}])
    thread.join()
    assert template.render(CHAT) == "Hello"


def test_processor_time_is_counted_for_each_chat() -> None:
    template = start("{% for a in range(99999) %}{% set b = a %}{% endfor %}{{ bos_token }}")
    (child,) = children()
    while sum(child.cpu_times()[:2]) < 3:
        assert template.render(CHAT) == "<s>"
    assert children() == [child]


def test_texts_pass_unchanged() -> None:
    chat = [{"role": "user", "content": "\ud800 ü 🦊 \x00\n" * 9}]
    assert start("{{ messages[0].content }}").render(chat) == chat[0]["content"]


def test_tools_and_the_date_are_passed() -> None:
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather"}}]
    template = start("{{ tools[0].function.name }} {{ strftime_now('%d %b %Y') }} {{ bos_token }}")
    assert template.render(CHAT, tools) == "weather 23 Nov 2026 <s>"


def test_messages_that_are_nested_too_deeply_are_rejected() -> None:
    nested: list[Any] = []
    for _ in range(5_000):
        nested = [nested]
    with pytest.raises(InputError, match="the messages cannot be passed to the template"):
        start("x").render([{"role": "user", "content": nested}])


def test_the_process_ends_with_its_owner() -> None:
    template = start("x")
    (child,) = children()
    del template
    assert not child.is_running()
