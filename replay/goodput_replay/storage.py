"""Traces and run folders in object storage, through the file systems of pyarrow.

A trace is copied to this machine before it is read, and a run folder is copied once it is complete:
neither a slow store nor a lost connection can then disturb the requests of a run. Credentials come
from the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS and the like), never from a
URI, because command lines are recorded.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import urlsplit

from goodput_core.errors import InputError, UnreachableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from pyarrow.fs import FileSystem

__all__ = [
    "FolderCopies",
    "download_file",
    "download_folder",
    "is_uri",
    "parse_uri",
    "require_writable",
    "upload_folder",
]

_PROBE: Final = ".writable"
_SCHEMES: Final = ("s3", "gs", "file")
_URI: Final = re.compile(r"([a-z][a-z0-9+.-]*)://\S+")


def is_uri(text: str) -> bool:
    """True if a text names a place in object storage rather than a path of this machine."""
    return "://" in text


def parse_uri(text: str) -> str:
    """Return a URI of a supported store.

    Raises:
        ValueError: the scheme is not supported, or the URI contains credentials.
    """
    match = _URI.fullmatch(text)
    if match is None or match[1] not in _SCHEMES:
        raise ValueError(
            f"{_shown(text)!r} is not a place in object storage; write s3://BUCKET/PATH, "
            "gs://BUCKET/PATH or file:///PATH"
        )
    # Google's file system marks anonymous access by the user name `anonymous`.
    if (urlsplit(text).username or "anonymous") != "anonymous" or urlsplit(text).password:
        raise ValueError(
            f"{_shown(text)!r} contains credentials, which would be recorded; set the variables of "
            "the store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return text


def download_file(uri: str, folder: Path) -> Path:
    """Copy one object into a folder, and return the path of the copy.

    Raises:
        InputError: the object does not exist.
        UnreachableError: the store could not be read.
    """
    store, path = _open(uri)
    target = folder / (PurePosixPath(path).name or "object")
    with _named_errors(uri, "read"):
        _require_object(uri, store, path)
        _copy((store, path), (_local(), str(target)))
    return target


def download_folder(
    uri: str, folder: Path, *, names: Sequence[str] | None = None, deep: bool = False
) -> Path:
    """Copy the objects below a URI into a new folder, and return it.

    Args:
        uri: the place.
        folder: the new folder.
        names: copy only these files, as far as they exist; None for all files.
        deep: True to copy the files of these names from all folders below the URI.

    Raises:
        InputError: there are no objects.
        UnreachableError: the store could not be read.
    """
    store, path = _open(uri)
    folder.mkdir(parents=True)
    with _named_errors(uri, "read"):
        if names is None:
            _require_object(uri, store, path)
            _copy((store, path), (_local(), str(folder)))
            return folder
        root = path.rstrip("/")
        if deep:
            sources = _find_deep(store, root, folder, names)
            found = list(sources)
        else:
            sources = {f"{root}/{name}": folder / name for name in names}
            found = [info.path for info in store.get_file_info(list(sources)) if info.is_file]
        for source in found:
            _copy((store, source), (_local(), str(sources[source])))
        if not found:
            _require_object(uri, store, path)
    return folder


def _find_deep(store: FileSystem, root: str, folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return the paths of the files of some names, and those of their copies, in new folders."""
    from pyarrow.fs import FileSelector  # noqa: PLC0415

    found = {}
    for info in store.get_file_info(FileSelector(root, recursive=True, allow_not_found=True)):
        parts = PurePosixPath(info.path.removeprefix(root).strip("/")).parts
        # The name of an object may have any parts.
        if info.is_file and parts[-1] in names and ".." not in parts:
            found[info.path] = folder.joinpath(*parts)
            found[info.path].parent.mkdir(parents=True, exist_ok=True)
    return found


class FolderCopies:
    """Copies of folders in object storage, which are removed at the end of the block."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._root: Path | None = None
        self._copies: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def folder(self, place: str, *, names: Sequence[str] | None = None, deep: bool = False) -> Path:
        """Return a folder of this machine, which is copied first if its place is a URI.

        Args:
            place: a path, or a URI of object storage.
            names: see `download_folder`.
            deep: see `download_folder`.

        Raises:
            UsageError: the URI is not that of a supported store.
            InputError: there are no objects.
            UnreachableError: the store could not be read.
        """
        if not is_uri(place):
            return Path(place)
        try:
            uri = parse_uri(place)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if self._root is None:
            self._root = Path(self._stack.enter_context(TemporaryDirectory(prefix="goodput-")))
        copy = self._root / f"run-{len(self._copies):04}"
        self._copies[str(copy)] = _shown(uri)
        return download_folder(uri, copy, names=names, deep=deep)

    def with_uris(self, text: str) -> str:
        """Return a text with the URIs of the copied folders instead of their local paths."""
        for copy, uri in self._copies.items():
            text = text.replace(copy, uri)
        return text


def upload_folder(folder: Path, uri: str) -> None:
    """Copy the files of a folder below a URI.

    Raises:
        UnreachableError: the store could not be written.
    """
    store, path = _open(uri)
    with _named_errors(uri, "written"):
        if store.type_name == "local":  # the others have no folders
            store.create_dir(path, recursive=True)
        _copy((_local(), str(folder)), (store, path))


def require_writable(uri: str) -> None:
    """Write an empty object below a URI, and delete it again.

    A run of hours whose folder is to be copied there must not begin without a bucket or the right
    to write.

    Raises:
        UnreachableError: the store could not be written.
    """
    store, path = _open(uri)
    probe = f"{path.rstrip('/')}/{_PROBE}"
    with _named_errors(uri, "written"):
        if store.type_name == "local":
            store.create_dir(path, recursive=True)
        store.open_output_stream(probe).close()
    with suppress(OSError):  # the right to delete is not required
        store.delete_file(probe)


def _local() -> FileSystem:
    from pyarrow.fs import LocalFileSystem  # noqa: PLC0415

    return LocalFileSystem()


def _open(uri: str) -> tuple[FileSystem, str]:
    from pyarrow.fs import FileSystem  # noqa: PLC0415 - takes a while to load

    try:
        store, path = FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        raise InputError(f"{_shown(uri)}: cannot be used: {_one_line(error)}") from error
    return store, path


def _require_object(uri: str, store: FileSystem, path: str) -> None:
    from pyarrow.fs import FileType  # noqa: PLC0415

    if store.get_file_info(path).type == FileType.NotFound:
        raise InputError(f"{_shown(uri)}: no such object; check the bucket and the path")


def _copy(source: tuple[FileSystem, str], target: tuple[FileSystem, str]) -> None:
    """Copy a file to a file, or the files of a folder to a folder."""
    from pyarrow.fs import copy_files  # noqa: PLC0415

    copy_files(source[1], target[1], source[0], target[0])


@contextmanager
def _named_errors(uri: str, verb: str) -> Iterator[None]:
    """Raise errors of a file system with the URI that they concern."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UnreachableError(
            f"{_shown(uri)}: cannot be {verb}: {_one_line(error)}; check the address and the "
            "credentials"
        ) from error


def _shown(uri: str) -> str:
    """Return a URI without its query and user information, which may be secret."""
    return re.sub(r"//[^/@]*@", "//", uri.partition("?")[0])[:200]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
