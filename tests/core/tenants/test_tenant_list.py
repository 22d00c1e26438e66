"""The file of tenants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.errors import InputError
from goodput_core.tenants.tenant_list import (
    MAX_TENANTS,
    Tenant,
    format_tenants,
    hash_key,
    parse_tenants,
)

HASH = hash_key("key of acme").hex()
OTHER = hash_key("another key").hex()


def test_a_line_has_a_name_a_weight_and_hashes() -> None:
    text = f"# tenants\n\nacme weight=3 sha256:{HASH} sha256:{OTHER}\r\n  zeta sha256:{'0' * 64}\n"
    assert parse_tenants(text.encode()) == (
        Tenant(name="acme", weight=3, hashes=(hash_key("key of acme"), hash_key("another key"))),
        Tenant(name="zeta", weight=1, hashes=(bytes(32),)),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("", "no tenants; write at least one line", id="empty"),
        pytest.param("# none\n", "no tenants", id="only a comment"),
        pytest.param(
            f"secret-key sha256:{HASH}\nsecret-key sha256:{OTHER}",
            "line 2: its tenant has a line already",
            id="twice",
        ),
        pytest.param(f"a sha256:{HASH}\nb sha256:{HASH}", "hash is on line 1", id="same key"),
        pytest.param(f"a sha256:{HASH} sha256:{HASH}", "hash is on line 1", id="key twice"),
        pytest.param("a", "line 1: a tenant has 1 to 4 hashes", id="no hash"),
        pytest.param(f"A sha256:{HASH}", "line 1: the name must", id="upper case"),
        pytest.param(f"other sha256:{HASH}", "differ from 'other'", id="reserved"),
        pytest.param(f"{'a' * 41} sha256:{HASH}", "the name must", id="long name"),
        pytest.param(f"-a sha256:{HASH}", "the name must", id="hyphen"),
        pytest.param(f"a weight=0 sha256:{HASH}", "a field is neither", id="weight 0"),
        pytest.param(f"a weight=1001 sha256:{HASH}", "one weight from 1 to 1000", id="weight 1001"),
        pytest.param(f"a weight=1 weight=2 sha256:{HASH}", "one weight", id="two weights"),
        pytest.param("a secret-key", "line 1: a field is neither", id="a key, not its hash"),
        pytest.param(f"a sha256:{HASH[:-1]}", "a field is neither", id="short hash"),
        pytest.param(f"a {' '.join(f'sha256:{n:064x}' for n in range(5))}", "1 to 4", id="5 keys"),
        pytest.param("a \xff\x00", "a field is neither", id="binary"),
        pytest.param("a " + "x" * 999_999, "a field is neither", id="a key of 1 MB"),
        pytest.param("x" * ((1 << 20) + 1), "larger than 1 MiB", id="too large"),
        pytest.param(
            "".join(f"t{n} sha256:{n:064x}\n" for n in range(10_000)),
            f"line {MAX_TENANTS + 1}: more than 1,000 tenants",
            id="10,000 tenants",
        ),
    ],
)
def test_an_invalid_file_is_rejected_without_quoting_it(text: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_tenants(text.encode("latin-1"))
    message = str(caught.value)
    assert problem in message
    assert len(message) < 250
    assert "secret" not in message
    assert "\n" not in message


names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)


@given(st.lists(st.tuples(names, st.integers(1, 1000), st.integers(1, 4)), min_size=1, max_size=20))
def test_a_written_file_is_read_as_it_was(rows: list[tuple[str, int, int]]) -> None:
    tenants = tuple(
        Tenant(
            name=name,
            weight=weight,
            hashes=tuple(hash_key(f"{name}{number}") for number in range(keys)),
        )
        for name, (weight, keys) in {name: rest for name, *rest in rows if name != "other"}.items()
    )
    if tenants:
        assert parse_tenants(format_tenants(tenants).encode()) == tenants


@given(st.binary(max_size=300))
def test_any_bytes_are_tenants_or_one_sentence(data: bytes) -> None:
    problem = ""
    tenants: tuple[Tenant, ...] = ()
    try:
        tenants = parse_tenants(data)
    except InputError as error:
        problem = str(error)
    assert bool(tenants) != bool(problem)
    assert "\n" not in problem
