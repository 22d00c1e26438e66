"""`goodput tenants`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from goodput_core.errors import InputError
from goodput_core.tenants.command import main
from goodput_core.tenants.tenant_list import hash_key, parse_tenants

if TYPE_CHECKING:
    from pathlib import Path


def test_a_key_is_printed_once_and_replaced_without_a_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tenants"

    def run(*arguments: str) -> str:
        assert main([*arguments, "--file", str(file)]) == 0
        return capsys.readouterr().out.strip()

    first = run("add", "acme", "--weight", "3")
    run("add", "zeta")
    second = run("add", "acme")
    assert len(first) == 43
    assert first not in file.read_text()
    acme = parse_tenants(file.read_bytes())[0]
    assert (acme.weight, acme.hashes) == (3, (hash_key(first), hash_key(second)))
    run("remove-key", "acme")
    assert parse_tenants(file.read_bytes())[0].hashes == (hash_key(second),)
    assert run("list") == "acme weight=3 keys=1\nzeta weight=1 keys=1"
    run("remove", "zeta")
    assert run("list") == "acme weight=3 keys=1"


def test_comments_and_other_lines_stay_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    line = "{}  sha256:{}"
    before = [
        b"# The team of J\xf6rg.",
        line.format("zeta", "0" * 64).encode(),
        b"",
        b"  # Bought in May.",
        line.format("acme", "1" * 64).encode(),
        line.format("gone", "2" * 64).encode(),
        b"# The end.",
    ]
    file.write_bytes(b"\n".join(before))
    for arguments in (["add", "acme"], ["add", "new"], ["remove", "gone"], ["remove-key", "acme"]):
        main([*arguments, "--file", str(file)])
    after = file.read_bytes().splitlines()
    assert [*after[:4], after[5]] == [*before[:4], before[6]]
    assert after[4].startswith(b"acme weight=1 sha256:")
    assert after[6].startswith(b"new weight=1 sha256:")
    assert len(after) == 7


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["add", "Acme"], "is unchanged: line 2: the name must"),
        (["remove", "zeta"], "no tenant zeta"),
        (["remove", "acme"], "is unchanged: no tenants"),
        (["remove-key", "acme"], "acme has one key only"),
    ],
)
def test_an_invalid_change_leaves_the_file_as_it_was(
    tmp_path: Path, arguments: list[str], problem: str
) -> None:
    file = tmp_path / "tenants"
    main(["add", "acme", "--file", str(file)])
    content = file.read_bytes()
    with pytest.raises(InputError, match=problem):
        main([*arguments, "--file", str(file)])
    assert file.read_bytes() == content


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; make it with goodput tenants add"):
        main(["list", "--file", str(tmp_path / "none")])
