"""Checks of the Dockerfiles without a build, because test machines have no container engine.

Every copied path exists and is sent to the builder. Every installed package is declared and pinned.
No image contains a package that its component must not import.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, requires
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
    "engine": {"kopf", "kubernetes", "pyarrow"},
    "replay": {"torch", "kopf", "kubernetes"},
}


OF_TORCH = {canonicalize_name(Requirement(line).name) for line in EXTRAS["torch"]}


@dataclass
class Stage:
    """The instructions from one FROM to the next."""

    base: str
    copied: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    """The stages named by COPY --from."""
    run: list[str] = field(default_factory=list)
    last: dict[str, str] = field(default_factory=dict)
    """The arguments of instructions of which only the last has an effect."""


@dataclass
class ParsedDockerfile:
    """A Dockerfile: its build arguments, and its stages by name; the last has no name."""

    arguments: dict[str, str] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)


def read(text: str) -> ParsedDockerfile:
    """Parse a Dockerfile; an instruction that our Dockerfiles do not use is an error."""
    image = ParsedDockerfile()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        stage = list(image.stages.values())[-1] if image.stages else None
        match instruction:
            case "":
                pass
            case "ARG" if stage:
                assert rest in image.arguments, "a stage only makes a global argument visible"
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
                raise AssertionError(f"{instruction} is not supported")
    return image


def sent(path: PurePosixPath) -> bool:
    """True if .dockerignore sends a file to the builder; the last matching pattern decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        pattern = line.removeprefix("!").removeprefix("**/")
        for one in (path, *path.parents):
            name = one.name if "**/" in line else str(one)
            if fnmatchcase(name, pattern):
                kept = line.startswith("!")
    return kept


def installed_extras(image: ParsedDockerfile) -> list[str]:
    """Return the extras that an image installs unless a build argument names others."""
    install = image.stages["build"].run[-1].replace("${EXTRAS}", image.arguments.get("EXTRAS", ""))
    (extras,) = re.findall(r"pip install .*['\"]\.\[([a-z,]+)\]['\"]", install)
    return str(extras).split(",")


def closure(extras: list[str]) -> set[str]:
    """Return the distributions that these extras install, with their dependencies.

    The dependencies of torch are included only if it is installed.
    """
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
        try:
            dependencies = requires(name) or ()
        except PackageNotFoundError:
            assert name in OF_TORCH, f"{name} is not installed"
            dependencies = ()
        for line in dependencies:
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
def image(dockerfile: Path) -> ParsedDockerfile:
    return read(dockerfile.read_text(encoding="utf-8"))


def test_each_component_that_runs_in_pods_has_an_image() -> None:
    assert [path.parent.name for path in DOCKERFILES] == sorted(ABSENT)


def test_every_copied_path_exists_and_is_sent_to_the_builder(image: ParsedDockerfile) -> None:
    copied = image.stages["build"].copied
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert [name for name in copied if not sent(PurePosixPath(name))] == []


def test_every_source_of_the_wheel_is_copied(image: ParsedDockerfile) -> None:
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


def test_every_installed_package_is_declared_and_pinned(image: ParsedDockerfile) -> None:
    extras = installed_extras(image)
    assert set(extras) <= set(EXTRAS)
    install = image.stages["build"].run[-1]
    assert "constraints.txt" in image.stages["build"].copied
    assert "PIP_CONSTRAINT=constraints.txt" in install
    assert "PIP_BUILD_CONSTRAINT=constraints.txt" in install
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    assert closure(extras) - pinned == set()


@pytest.mark.torch
def test_every_dependency_of_torch_in_the_engines_image_is_pinned() -> None:
    image = read((ROOT / "engine" / "Dockerfile").read_text(encoding="utf-8"))
    assert len(closure(installed_extras(image))) > len(closure(["engine"])) + len(OF_TORCH)
    test_every_installed_package_is_declared_and_pinned(image)


def test_an_image_has_no_package_that_its_component_must_not_import(
    dockerfile: Path, image: ParsedDockerfile
) -> None:
    component = dockerfile.parent.name
    brought = closure(installed_extras(image))
    assert "aiohttp" in brought
    assert "multidict" in brought, "dependencies of dependencies are included"
    assert brought & ABSENT[component] == set()
    assert ("torch" in brought) == (component == "engine")


def test_all_images_are_built_on_one_release_of_python_that_the_project_supports(
    image: ParsedDockerfile,
) -> None:
    assert {stage.base for stage in image.stages.values()} == {"${PYTHON}"}
    matched = re.fullmatch(r"python:3\.(\d+)-slim-[a-z]+", image.arguments["PYTHON"])
    assert matched, "a fixed minor version and Debian release"
    least = int(PROJECT["project"]["requires-python"].removeprefix(">=3."))
    assert int(matched[1]) >= least
    first = read(DOCKERFILES[0].read_text(encoding="utf-8"))
    assert image.arguments["PYTHON"] == first.arguments["PYTHON"]


def test_an_image_runs_a_goodput_command_as_an_unprivileged_user(image: ParsedDockerfile) -> None:
    *_, final = image.stages.values()
    assert final.taken == ["build"]
    user, _, group = final.last["USER"].partition(":")
    assert int(user) > 0, "a number: Kubernetes cannot tell whether a name is root"
    assert int(group) > 0
    (program,) = shlex.split(final.last["ENTRYPOINT"].strip("[]"))
    command = shlex.split(final.last["CMD"].strip("[]").replace(",", " "))[0]
    assert program in PROJECT["project"]["scripts"]
    assert command in PROJECT["project"]["entry-points"]["goodput.commands"]
