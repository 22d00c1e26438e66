"""Before it starts: an API server that knows no LLMServices, or none at all, is one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from goodput_core.errors import UnreachableError
from goodput_operator.cluster.runtime import require_served

PATH = "/apis/goodput.dev/v1alpha1"


async def test_without_the_custom_resource_it_says_what_to_install(memory: Any) -> None:
    with pytest.raises(UnreachableError, match="install its custom resource definition"):
        await require_served(memory.client)


async def test_a_refusal_is_told_in_the_servers_words(memory: Any) -> None:
    refusal = {"reason": "Forbidden", "message": 'User "op" cannot get path'}
    memory.server.refuse["GET", PATH] = (403, refusal)
    with pytest.raises(UnreachableError, match='User "op" cannot get path'):
        await require_served(memory.client)


async def test_an_api_server_that_serves_them_is_all_it_takes(memory: Any) -> None:
    memory.server.objects[PATH] = {"kind": "APIResourceList"}
    await require_served(memory.client)
