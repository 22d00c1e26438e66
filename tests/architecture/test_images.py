"""The Dockerfiles, read and not built: no machine of ours that runs the tests has an engine for it.

What a build would stumble on, or quietly get wrong, is seen from the files and from the packages
that are installed here: what is copied exists and reaches the builder, what is installed is
declared and pinned, and nothing heavy that the image's component must not know comes along.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import requires
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
DOCKERFILES = sorted(ROOT.glob("*/Dockerfile"))
ABSENT = {
    "operator": {"torch", "pyarrow", "matplotlib"},
    "engine": {"torch", "kopf", "kubernetes", "pyarrow"},
    "replay": {"torch", "kopf", "kubernetes"},
}


@dataclass
class Stage:
    """What one FROM begins."""

    base: str
    copied: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    """Stages that something is copied from."""
    run: list[str] = field(default_factory=list)
    last: dict[str, str] = field(default_factory=dict)
    """Of the instructions of which the last counts: what stands after it."""


@dataclass
class Image:
    """A Dockerfile: its build arguments, and its stages by name; the last has none."""

    arguments: dict[str, str] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)


def read(text: str) -> Image:
    """A Dockerfile, as far as ours go; an instruction that is not known here is an error."""
    image = Image()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        stage = list(image.stages.values())[-1] if image.stages else None
        match instruction:
            case "":
                pass
            case "ARG":
                name, _, value = rest.partition("=")
                image.arguments[name] = value
            case "FROM":
                base, _, name = rest.partition(" AS ")
                image.stages[name] = Stage(base=base)
            case "COPY" if stage and rest.startswith("--from="):
                stage.taken.append(rest.split()[0].removeprefix("--from="))
            case "COPY" if stage:
                stage.copied += rest.split()[:-1]
            case "RUN" if stage:
                stage.run.append(rest)
            case "WORKDIR" | "ENV" | "USER" | "ENTRYPOINT" | "CMD" if stage:
                stage.last[instruction] = rest
            case _:
                raise AssertionError(f"{instruction} is not known here")
    return image


def sent(path: PurePosixPath) -> bool:
    """Whether .dockerignore lets a file reach the builder: the last pattern that matches counts."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        pattern = line.removeprefix("!").removeprefix("**/")
        for one in (path, *path.parents):
            name = one.name if "**/" in line else str(one)
            if fnmatchcase(name, pattern):
                kept = line.startswith("!")
    return kept


def installed_extras(image: Image) -> list[str]:
    """The extras that an image is made of."""
    (extras,) = re.findall(r"pip install .*'\.\[([a-z,]+)\]'", image.stages["build"].run[-1])
    return str(extras).split(",")


def closure(extras: list[str]) -> set[str]:
    """The names of all that these extras bring, as it is installed here."""
    found: set[str] = set()
    left = [Requirement(line) for extra in extras for line in EXTRAS[extra]]
    seen = set()
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if (name, *sorted(one.extras)) in seen:
            continue
        seen.add((name, *sorted(one.extras)))
        found.add(name)
        for line in requires(name) or ():
            further = Requirement(line)
            marker = further.marker
            if marker is None or any(
                marker.evaluate({"extra": extra}) for extra in ("", *one.extras)
            ):
                left.append(further)
    return found


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.parent.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def image(dockerfile: Path) -> Image:
    return read(dockerfile.read_text(encoding="utf-8"))


def test_there_is_an_image_of_each_component_that_runs_in_pods() -> None:
    assert [path.parent.name for path in DOCKERFILES] == sorted(ABSENT)


def test_all_that_is_copied_is_there_and_reaches_the_builder(image: Image) -> None:
    copied = image.stages["build"].copied
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert [name for name in copied if not sent(PurePosixPath(name))] == []


def test_all_that_the_wheel_is_built_from_is_copied(image: Image) -> None:
    project = PROJECT["project"]
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = ["pyproject.toml", project["readme"], *project["license-files"], *packages]
    copied = set(image.stages["build"].copied)
    assert [
        name
        for name in needed
        if not {str(one) for one in (PurePosixPath(name), *PurePosixPath(name).parents)} & copied
    ] == []
    files = [path for name in packages for path in (ROOT / name).rglob("*") if path.is_file()]
    kept_back = [p for p in files if not sent(PurePosixPath(p.relative_to(ROOT).as_posix()))]
    assert [path for path in kept_back if "__pycache__" not in path.parts] == []


def test_what_is_installed_is_declared_and_pinned(image: Image) -> None:
    extras = installed_extras(image)
    assert set(extras) <= set(EXTRAS)
    install = image.stages["build"].run[-1]
    assert "constraints.txt" in image.stages["build"].copied
    assert "PIP_CONSTRAINT=constraints.txt" in install
    assert "PIP_BUILD_CONSTRAINT=constraints.txt" in install
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    assert closure(extras) - pinned == set()


def test_an_image_has_nothing_that_its_component_must_not_know(
    dockerfile: Path, image: Image
) -> None:
    brought = closure(installed_extras(image))
    assert "aiohttp" in brought
    assert "multidict" in brought, "what packages need themselves counts as well"
    assert brought & ABSENT[dockerfile.parent.name] == set()


def test_all_images_are_built_on_one_release_of_python_that_the_project_supports(
    image: Image,
) -> None:
    assert {stage.base for stage in image.stages.values()} == {"${PYTHON}"}
    matched = re.fullmatch(r"python:3\.(\d+)-slim-[a-z]+", image.arguments["PYTHON"])
    assert matched, "a minor version and a release of Debian, neither of which moves"
    least = int(PROJECT["project"]["requires-python"].removeprefix(">=3."))
    assert int(matched[1]) >= least
    assert image.arguments == read(DOCKERFILES[0].read_text(encoding="utf-8")).arguments


def test_an_image_runs_a_command_of_ours_as_nobody_in_particular(image: Image) -> None:
    *_, final = image.stages.values()
    assert final.taken == ["build"]
    user, _, group = final.last["USER"].partition(":")
    assert int(user) > 0, "a number: Kubernetes cannot tell whether a name is root"
    assert int(group) > 0
    (program,) = shlex.split(final.last["ENTRYPOINT"].strip("[]"))
    command = shlex.split(final.last["CMD"].strip("[]").replace(",", " "))[0]
    assert program in PROJECT["project"]["scripts"]
    assert command in PROJECT["project"]["entry-points"]["goodput.commands"]
