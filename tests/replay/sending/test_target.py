"""Target URLs, headers, and the permission for another machine."""

from __future__ import annotations

import socket

import pytest

from goodput_core.errors import UnreachableError, UsageError
from goodput_replay.sending.target import Target, parse_header, parse_target, require_permission


@pytest.mark.parametrize(
    ("text", "url", "host"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "127.0.0.1"),
        ("localhost:8000", "http://localhost:8000", "localhost"),
        ("http://h:80/v1/", "http://h:80", "h"),
        ("https://h/models/a/v1", "https://h/models/a", "h"),
        ("http://[::1]:8000", "http://[::1]:8000", "::1"),
    ],
)
def test_a_target_is_parsed(text: str, url: str, host: str) -> None:
    assert parse_target(text) == Target(url=url, host=host)


@pytest.mark.parametrize(
    "text",
    ["", "ftp://h", "http://", "http://h:99999", "http://h:x", "http://u:p@h", "http://h?a=1",
     "http://h#a"],
)  # fmt: skip
def test_an_invalid_target_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"URL|leave it out"):
        parse_target(text)


def test_a_password_in_a_url_is_not_printed() -> None:
    with pytest.raises(ValueError, match="--api-key-env") as caught:
        parse_target("http://user:hunter2@h")
    assert "hunter2" not in str(caught.value)


def test_a_header_is_a_name_and_a_value() -> None:
    assert parse_header("X-Tenant: blue: or not") == ("X-Tenant", "blue: or not")
    assert parse_header("X-Empty:") == ("X-Empty", "")


@pytest.mark.parametrize("text", ["X-Tenant", ": a", "X Y: a", "X: a\r\nZ: b", "X: é"])
def test_an_invalid_header_is_rejected_without_printing_its_value(text: str) -> None:
    with pytest.raises(ValueError, match="write NAME: VALUE") as caught:
        parse_header(text)
    assert "b'" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"])
def test_this_machine_needs_no_permission(url: str) -> None:
    require_permission(parse_target(url), granted=False)


def test_another_machine_needs_permission() -> None:
    target = parse_target("http://192.0.2.7:8000")
    with pytest.raises(UsageError, match=r"another machine \(192.0.2.7\).*add --yes"):
        require_permission(target, granted=False)
    require_permission(target, granted=True)


def test_a_name_of_this_machine_and_another_needs_permission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(*_args: object, **_kwargs: object) -> list[object]:
        return [(2, 1, 6, "", ("127.0.0.1", 0)), (2, 1, 6, "", ("192.0.2.9", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(UsageError, match=r"192\.0\.2\.9"):
        require_permission(parse_target("http://both"), granted=False)


def test_a_host_that_does_not_exist_is_unreachable() -> None:
    with pytest.raises(UnreachableError, match=r"host 'nowhere\.invalid' was not found"):
        require_permission(parse_target("http://nowhere.invalid"), granted=True)
