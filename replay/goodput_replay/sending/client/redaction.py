"""Keep secrets that a server echoes out of records.

Some servers quote the key of a rejected request in their error message, which is recorded. A text
can be truncated within a key, and an address has it percent-encoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MASK", "Redaction"]

MASK: Final = "***"
_MIN_LENGTH: Final = 4
# So many first characters of a value are masked wherever they occur.
_START_LENGTH: Final = 8


@dataclass(frozen=True, slots=True)
class Redaction:
    """Masks secrets in texts.

    Args:
        secrets: texts to mask, the longest first.
    """

    secrets: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, values: Iterable[str]) -> Redaction:
        """Mask the values of headers, and their last words, such as the token after `Bearer`.

        Values of fewer than four characters are not masked, because they occur by chance.
        """
        words = {word for value in values for word in (value.strip(), value.split(" ")[-1])}
        secrets = {word for word in words if len(word) >= _MIN_LENGTH}
        secrets |= {quote(word, safe="") for word in secrets}
        return cls(tuple(sorted(secrets, key=len, reverse=True)))

    def mask(self, text: str) -> str:
        """Return the text without secrets, and without the start of a truncated one."""
        for secret in self.secrets:
            start = secret[:_START_LENGTH]
            at = text.find(start)
            while at >= 0:
                end = at + len(start)
                while text[at : end + 1] == secret[: end + 1 - at] and end < len(text):
                    end += 1
                text = text[:at] + MASK + text[end:]
                at = text.find(start, at + len(MASK))
            for length in range(min(len(start) - 1, len(text)), _MIN_LENGTH - 1, -1):
                if text.endswith(secret[:length]):
                    text = text[:-length] + MASK
                    break
        return text
