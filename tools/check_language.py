"""Reject wording that CONTRIBUTING.md's language rules exclude, in code, tests and docs.

    python tools/check_language.py              # the whole repository
    python tools/check_language.py engine       # one folder or file

Docstrings, comments, messages, help texts, Markdown, templates, and the names of modules, classes
and tests are read; code quoted in backticks or fences is not. A line that needs a rejected word
ends in `# language: ok` (in Markdown `<!-- language: ok -->`).
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = (
    "core", "traces", "engine", "replay", "operator", "charts",
    "docs", "examples", "benchmarks", "tools", "tests",
)  # fmt: skip
PAGES: Final = ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", ".ci/run")
# NOTES.txt is the text that Helm prints after an installation.
READ: Final = (
    "*.py", "*.md", "*.yaml", "*.go", "*.j2", "*.tpl", "*.css", "*.js",
    "NOTES.txt", "Dockerfile",
)  # fmt: skip
# They spell out what is rejected, or were written by others.
EXEMPT: Final = (
    "tools/check_language.py",
    "tests/architecture/test_language.py",
    "replay/goodput_replay/report/assets/uplot/uPlot.min.css",
    "replay/goodput_replay/report/assets/uplot/uPlot.iife.min.js",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A rejected pattern and its remedy."""

    regex: re.Pattern[str]
    remedy: str


def _pattern(regex: str, remedy: str) -> Pattern:
    return Pattern(regex=re.compile(regex), remedy=remedy)


# At the start of a docstring.
SUMMARIES: Final = (
    _pattern(
        r"(What|Whether|Who|Whom|Whose|Whoever|Whatever|Of|That|All that"
        r"|As (many|much)|How (many|much))\b",
        "begin with an imperative, a noun phrase or 'True if'",
    ),
)

_PEOPLE: Final = (
    r"(people|person|user|users|reader|readers|anyone|someone|those|engineer|engineers|contributors?"
    r"|operators|administrators?|developers?|teams?|humans?)"
)

# Anywhere in prose.
PROSE: Final = (
    _pattern(
        r"(?i)\b(nobody|somebody|everybody|anybody|whoever|whomever|whom)\b", "name the object"
    ),
    _pattern(r"(?i)\bwho\b", "a thing is 'it'; name it"),
    _pattern(r"\bNone: (?=[a-z])", "write 'None if …'"),
    _pattern(
        r"(?i)\bwhat (?:is|was|are|were|it is|they are) (?:not )?(?:asked|told|said|promised"
        r"|wanted|owed|expected|left|kept|meant|waited|looked|held|due|taken|given|needed|sent|served|stored)\b",
        "name the object instead of a headless clause",
    ),
    _pattern(
        r"(?i)\b(?:of|for|with|by|from|than) what\b",
        "name the object instead of 'of what …'",
    ),
    _pattern(r"(?i)\bof which (?:nothing|none|each|one)\b", "split the sentence"),
    _pattern(r"(?i)(?<!there )\b(?:is|are|was|were|be) (?:none|no such)\b", "state the condition"),
    _pattern(r"(?i)\btold\b", "set, reported, configured, unless given"),
    _pattern(r"(?i)\b(?:bears?|bore|borne)\b", "sustains, holds, allows"),
    _pattern(r"(?i)\b(?:its|their|whose|a|his) turns?\b", "next in order; a reconciliation"),
    _pattern(r"(?i)\btroubles?\b", "problem"),
    _pattern(r"(?i)\b(?:of|with) (?:ours|theirs|its own making)\b", "name the owner"),
    _pattern(
        r"(?i)\b(?:keep|keeps|kept|keeping) (?:its|their|every|each|a|the|all) promises?\b",
        "meet the SLO",
    ),
    _pattern(r"(?i)\b(?:is|are|was|were) promised\b", "the target, the objective"),
)  # fmt: skip

# Words of the names of modules and classes. Words that also name something of the field itself are
# left out: priority levels, memory and back-pressure, shares, confidence bounds, counter readings,
# EndpointSlices, jobs of scheduling theory, feedback queues, due times, feasibility tests, steady
# decoding, and `sending`, the part of the replay that sends requests.
METAPHORS: Final = {
    "floor": "request table", "door": "admission", "draft": "step builder",
    "cohort": "decode batch", "fold": "fast-forward", "folding": "fast-forward",
    "handover": "KV transfer", "outlook": "slack", "pausing": "priority levels",
    "gathered": "batching", "offloading": "KV offload", "pacing": "prefill budget",
    "weighing": "replica inputs", "relay": "proxy", "passing": "proxy",
    "exchange": "request state", "intake": "request context", "room": "memory limit",
    "answering": "handlers", "answered": "length histogram", "answer": "response",
    "following": "manifest watch", "turn": "reconcile", "turns": "reconcile",
    "rounds": "reconciler", "asking": "parse", "controlling": "control step",
    "deciding": "decide", "saying": "status", "said": "condition", "told": "reported",
    "tried": "apply attempt", "troubles": "problems", "trouble": "problem",
    "words": "messages", "standing": "base resources", "replaying": "runner",
    "facts": "run info", "quiet": "GC pause", "comparing": "sweep", "question": "sweep input",
    "choosing": "policy", "promise": "SLO, headers", "promises": "SLO window", "front": "app",
}  # fmt: skip

_ALLOWED: Final = "language: ok"
_QUOTED: Final = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
_FENCE: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"\]\([^)]*\)|<!--.*?-->|https?://\S+", re.DOTALL)
_ACTION: Final = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_TAG: Final = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|<[^>]*>", re.DOTALL)
# Comments over consecutive lines, and strings of several words.
_HASHES: Final = re.compile(r"(?:^|(?<=\s))#+( .*(?:\n[ \t]*#.*)*)", re.MULTILINE)
_SLASHES: Final = re.compile(r"//( .*(?:\n[ \t]*//.*)*)")
_BLOCK_COMMENT: Final = re.compile(r"/\*(.*?)\*/", re.DOTALL)
_STRING: Final = re.compile(r'"([^"\n]* [^"\n]*)"')
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One rejected phrase."""

    path: Path
    line: int
    phrase: str
    remedy: str

    def __str__(self) -> str:
        name = self.path.relative_to(ROOT)
        return f"{name}:{self.line}: {self.phrase!r}: {self.remedy}"


def check(path: Path) -> list[Violation]:
    """Return the violations of one file."""
    text = path.read_text(encoding="utf-8")
    found: Iterable[Violation]
    match path.suffix:
        case ".py":
            found = [*_module(path, text), *_comments(path, text)]
        case ".md":
            found = _prose(path, 1, _blank(_LINK, _blank(_FENCE, text)))
        case ".j2":
            found = _prose(path, 1, _blank(_TAG, text))
        case ".txt":  # of a chart
            found = _prose(path, 1, _blank(_ACTION, text))
        case ".go" | ".js":
            found = _parts(path, text, _SLASHES, _STRING)
        case ".toml":
            found = _parts(path, text, _HASHES, _STRING)
        case _:  # YAML and its templates, CSS, Makefiles, Dockerfiles, shell scripts
            found = _parts(path, text, _HASHES, _BLOCK_COMMENT)
    lines = text.splitlines()
    unique = {
        (v.line, v.phrase): v for v in found if not lines or _ALLOWED not in lines[v.line - 1]
    }
    return [unique[key] for key in sorted(unique)]


def _blank(regex: re.Pattern[str], text: str) -> str:
    """Replace every match by as many spaces, and keep line breaks."""
    return regex.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _prose(path: Path, line: int, text: str) -> Iterator[Violation]:
    plain = _blank(_QUOTED, text)
    # A phrase may be broken over two lines.
    flat = re.sub(r"\s", " ", plain)
    for pattern in PROSE:
        for match in pattern.regex.finditer(flat):
            if match[0].lower() == "who" and re.search(
                rf"{_PEOPLE} $", flat[: match.start()], re.IGNORECASE
            ):
                continue
            yield Violation(
                path=path,
                line=line + plain.count("\n", 0, match.start()),
                phrase=match[0],
                remedy=pattern.remedy,
            )


def _summary(path: Path, line: int, text: str) -> Iterator[Violation]:
    for pattern in SUMMARIES:
        if match := pattern.regex.match(text.lstrip()):
            yield Violation(path=path, line=line, phrase=f'"""{match[0]}', remedy=pattern.remedy)


def _module(path: Path, text: str) -> Iterator[Violation]:
    tree = ast.parse(text)
    yield from _name(path, 1, path.parent.name if path.stem == "__init__" else path.stem)
    for node in ast.walk(tree):
        match node:
            case ast.Expr(
                value=ast.Constant(value=str(doc))
            ):  # of a module, class, function, field
                yield from _summary(path, node.lineno, doc)
            case ast.Constant(value=str(message)):
                # A single word is data; a sentence is read by a person.
                if message.strip().count(" ") >= 1:
                    yield from _prose(path, node.lineno, message)
            case ast.ClassDef(name=name):
                yield from _name(path, node.lineno, name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name.startswith("test_"):
                    yield from _prose(path, node.lineno, name.replace("_", " "))


def _name(path: Path, line: int, name: str) -> Iterator[Violation]:
    for word in _WORD.findall(name.removeprefix("test_")):
        if word.lower() in METAPHORS:
            yield Violation(path=path, line=line, phrase=name, remedy=METAPHORS[word.lower()])


def _comments(path: Path, text: str) -> Iterator[Violation]:
    block, start, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string.lstrip("#").strip()
        if token.start[0] == last + 1:
            block += "\n" + comment
        else:
            yield from _prose(path, start, block)
            block, start = comment, token.start[0]
        last = token.start[0]
    yield from _prose(path, start, block)


def _parts(path: Path, text: str, *regexes: re.Pattern[str]) -> Iterator[Violation]:
    """Read the comments and strings of a file that is not Python."""
    for regex in regexes:
        for match in regex.finditer(text):
            part = re.sub(r"\n[ \t]*(?:#+|//) ?", "\n", match[1])
            yield from _prose(path, 1 + text.count("\n", 0, match.start(1)), part)


def files(names: Iterable[str]) -> Iterator[Path]:
    """Yield the files to read below these folders."""
    for name in names:
        path = (ROOT / name).resolve()
        if path.is_file():
            yield path
            continue
        for pattern in READ:
            for file in sorted(path.rglob(pattern)):
                generated = {"golden", "released", "__pycache__"} & set(file.parts)
                if not generated and file.relative_to(ROOT).as_posix() not in EXEMPT:
                    yield file


def folder_of(path: Path) -> str:
    """Return the entry of `FOLDERS` or `PAGES` that holds a file."""
    name = path.relative_to(ROOT).as_posix()
    return max(
        (one for one in (*FOLDERS, *PAGES) if f"{name}/".startswith(f"{one}/")), default=name
    )


def main(argv: list[str]) -> int:
    """Print the violations, with a count for each folder; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", help="folders or files; the whole repository if absent")
    paths = parser.parse_args(argv).paths
    found = [v for path in files(paths or (*FOLDERS, *PAGES)) for v in check(path)]
    for violation in found:
        print(violation)
    for folder, count in sorted(Counter(folder_of(v.path) for v in found).items()):
        print(f"{count:6} {folder}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
