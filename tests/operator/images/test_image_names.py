"""Names of images and registries, as container runtimes read them."""

from __future__ import annotations

import pytest

from goodput_operator.render.image_names import TagName, parse_registry, parse_tag_name, unpinned

DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("image", "registry", "repository", "tag"),
    [
        ("ghcr.io/example/engine:0.1.0", "ghcr.io", "example/engine", "0.1.0"),
        ("ghcr.io/example/engine", "ghcr.io", "example/engine", "latest"),
        ("vllm/vllm-openai:v0.33.0", "docker.io", "vllm/vllm-openai", "v0.33.0"),
        ("engine", "docker.io", "library/engine", "latest"),
        ("docker.io/engine:1", "docker.io", "library/engine", "1"),
        ("localhost/engine:1", "localhost", "engine", "1"),
        ("registry:5000/engine", "registry:5000", "engine", "latest"),
        ("registry:5000/a/b__c/d--e.f:V_1", "registry:5000", "a/b__c/d--e.f", "V_1"),
        ("[::1]:5000/engine:1", "[::1]:5000", "engine", "1"),
    ],
)
def test_a_name_has_the_parts_that_container_runtimes_read(
    image: str, registry: str, repository: str, tag: str
) -> None:
    name = parse_tag_name(image)
    assert name == TagName(registry=registry, repository=repository, tag=tag)
    assert name.at(DIGEST) == f"{registry}/{repository}@{DIGEST}"


@pytest.mark.parametrize(
    "image",
    [
        "",
        f"ghcr.io/example/engine@{DIGEST}",
        f"ghcr.io/example/engine:1@{DIGEST}",
        "ghcr.io/Example/engine:1",
        "ghcr.io/../v2:1",
        "ghcr.io/a//b:1",
        "ghcr.io/a/b:",
        "ghcr.io/a/b:c/d",
        "ghcr.io/a/b:1?x=y",
        "ghcr.io#x/a:1",
        "user@ghcr.io/a:1",
        "ghcr.io:99999999/a:1",
        f"ghcr.io/{'a' * 300}:1",
        "ghcr.io/a b:1",
    ],
)
def test_a_digest_and_an_invalid_name_are_not_resolved(image: str) -> None:
    found = parse_tag_name(image)
    assert found is None


def test_only_tags_of_the_given_registries_are_replaced() -> None:
    registries = {"ghcr.io", "docker.io"}
    assert unpinned("ghcr.io/a/b:1", registries) is not None
    assert unpinned("a/b:1", registries) is not None
    assert unpinned("ghcr.io.example.com/a/b:1", registries) is None
    assert unpinned("ghcr.io:443/a/b:1", registries) is None
    assert unpinned(f"ghcr.io/a/b@{DIGEST}", registries) is None


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("ghcr.io", "ghcr.io", "https://ghcr.io"),
        ("https://ghcr.io", "ghcr.io", "https://ghcr.io"),
        ("docker.io", "docker.io", "https://registry-1.docker.io"),
        ("http://registry.ci.svc:5000", "registry.ci.svc:5000", "http://registry.ci.svc:5000"),
    ],
)
def test_a_registry_has_a_name_and_a_url(text: str, name: str, url: str) -> None:
    assert parse_registry(text) == (name, url)


@pytest.mark.parametrize(
    "text", ["", "ftp://a.io", "://a.io", "a.io/path", "https://", "a b", "x@y"]
)
def test_an_invalid_registry_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a registry; write for example 'ghcr\.io'"):
        parse_registry(text)
