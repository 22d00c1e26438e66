"""Text of unknown origin made safe to show on a terminal."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""Return `text` with every character escaped that is not printable.

    Control characters, line separators and bidirectional overrides can rewrite or hide what a
    terminal shows. They become escapes as in Python source, for example `\x1b` or `\u202e`. For
    ids, names and error texts that come from files or servers.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "backslashreplace").decode()
        for character in text
    )
