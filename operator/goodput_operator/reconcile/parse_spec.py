"""What a stored LLMService asks for, if this version can give it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import NotBuiltError, SpecError
from goodput_core.spec.llmservice import LLMService
from goodput_core.support import require_served
from goodput_operator.reconcile.problems import Reason, Trouble

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.kube.objects import Object

__all__ = ["asked"]


def asked(service: Object) -> LLMServiceSpec | Trouble:
    """The spec, validated as it is elsewhere, or what is wrong with it in the validator's words.

    Args:
        service: as the API server stores it. Of its metadata the name alone is validated.
    """
    manifest = {
        "apiVersion": service["apiVersion"],
        "kind": service["kind"],
        "metadata": {"name": service["metadata"]["name"]},
        "spec": service.get("spec"),
    }
    try:
        read = LLMService.from_dict(manifest)
        require_served(read)
    except NotBuiltError as error:
        return Trouble(reason=Reason.NOT_BUILT, message=str(error))
    except SpecError as error:
        return Trouble(reason=Reason.INVALID_SPEC, message=str(error))
    return read.spec
