"""Weights from the Hugging Face Hub, in the cache of its own library.

The library downloads and stores the files. It starts an interrupted file again and compares only
its size, so large files are downloaded here, in the same places: they continue where they ended,
and enter the cache once their checksum is right. The names of cached files are their checksums,
which each start compares with their content.
"""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import huggingface_hub as hub
from huggingface_hub import constants, errors
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers

from goodput_core.errors import InputError, InternalError
from goodput_core.units import BYTES_PER_GIB
from goodput_engine.model_folder import TOKENIZER_FILE, read_json_object, tokenizer_problem
from goodput_engine.weights.checksums import file_digest
from goodput_engine.weights.locks import locked

if TYPE_CHECKING:
    from goodput_engine.weights.progress import FetchProgress

__all__ = ["hub_folder"]

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DEFAULT_BRANCH: Final = "main"
_INDEX: Final = "model.safetensors.index.json"
# The files that an engine reads, all in the first level of the repository.
_SAFE: Final = ".safetensors"
_WEIGHTS: Final = ("model.safetensors", "model-*-of-*.safetensors")
# A name that is no pattern and no path.
_NAME: Final = re.compile(r"[\w.-]+")
_FILES: Final = (
    *_WEIGHTS,
    _INDEX,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_PARTIAL: Final = ".goodput-partial"
# Smaller files are left to the library, and also larger ones than the Hub sends by plain HTTP.
_MIN_BYTES: Final = 1 << 20
_MAX_BYTES: Final = 50 * 10**9
_CONNECTIONS: Final = 4
_MAX_DETAIL: Final = 300
_SHA1_CHARACTERS: Final = 40
_SHA256_CHARACTERS: Final = 64


def hub_folder(repo: str, *, revision: str | None, offline: bool, progress: FetchProgress) -> Path:
    """Return the folder of a model in the cache, after a download of the missing files.

    Args:
        repo: ORG/NAME.
        revision: commit, tag or branch; None for the default branch.
        offline: True to use the cache only.
        progress: gets the phases.

    Raises:
        InputError: the model does not exist, has no weights in safetensors, is not in the cache,
            or cannot be downloaded; or a file has a wrong checksum.
        InternalError: the disk is too small.
        OSError: the cache cannot be written.
    """
    source = f"hf://{repo}"
    offline = offline or constants.HF_HUB_OFFLINE
    name = revision or _DEFAULT_BRANCH
    listed = _is_listed(repo, name)
    folder = _cached(repo, name) if offline or (listed and _COMMIT.fullmatch(name)) else None
    if offline:
        if folder is None:
            raise InputError(
                f"{source}: revision {name} is not, or not completely, in the cache "
                f"{constants.HF_HUB_CACHE}, and downloads are off; fetch it once with a network"
            )
        if not listed and not (folder / TOKENIZER_FILE).is_file():
            progress.warn(
                f"{source}: the cache has the weights of revision {name}, but no "
                f"{TOKENIZER_FILE}; fetch the model once with a network to add the missing files"
            )
    try:
        folder = folder or _download(repo, name, progress)
    except (
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.RevisionResolutionError,
    ) as error:
        folder = _unlisted(repo, name, _refused(source, name, error), error, progress)
    except OSError as error:
        if error.errno is not None:  # the cache
            raise
        raise InputError(f"{source}: the download is incomplete; start again") from error
    except InputError:
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in {"httpx2", "httpcore2"}:
            raise
        refused = InputError(
            f"{source}: {constants.ENDPOINT} cannot be reached ({_detail(error)}); check the "
            "network and start again, and the download continues where it ended"
        )
        folder = _unlisted(repo, name, refused, error, progress)
    _compare(source, folder, progress)
    return folder


def _is_listed(repo: str, revision: str) -> bool:
    """Return True if the cache has the Hub's list of the files of a revision.

    Other programs download single files, for example only the weights and their configuration.
    """
    try:
        hub.get_cached_repo_tree(repo, revision=revision)
    except errors.CachedRepoTreeNotFoundError:
        return False
    return True


def _cached(repo: str, revision: str) -> Path | None:
    """Return the folder of a revision that is in the cache, else None.

    All files of the Hub's list are there; without this list, at least the weights are.
    """
    try:
        folder = Path(
            hub.snapshot_download(
                repo, revision=revision, local_files_only=True, allow_patterns=list(_FILES)
            )
        )
    except errors.LocalEntryNotFoundError:
        return None
    shards = _shards(folder / _INDEX)
    if not shards:
        if (folder / _INDEX).is_file():
            return folder  # refused when the model is loaded
        shards = ("model.safetensors",)
    complete = all((folder / shard).is_file() for shard in shards)
    return folder if complete and (folder / "config.json").is_file() else None


def _unlisted(
    repo: str, revision: str, refused: InputError, error: Exception, progress: FetchProgress
) -> Path:
    """Return the folder of a revision whose missing files the Hub does not give.

    Raises:
        InputError: `refused`, because the cache does not even have the weights.
    """
    folder = _cached(repo, revision)
    if folder is None:
        raise refused from error
    progress.warn(
        f"{refused}; the model is served from the cache, which may lack files, for example "
        f"{TOKENIZER_FILE}"
    )
    return folder


def _shards(index: Path) -> tuple[str, ...]:
    """Return the files of weights that an index names; nothing if the index is missing.

    An index that cannot be read, and names outside the folder, are refused when the model is
    loaded.
    """
    if not index.is_file():
        return ()
    try:
        names = read_json_object(index).get("weight_map", {}).values()
    except (InputError, AttributeError):
        return ()
    shards = {str(name) for name in names}
    return tuple(sorted(name for name in shards if name.endswith(_SAFE) and _NAME.fullmatch(name)))


def _download(repo: str, revision: str, progress: FetchProgress) -> Path:
    api = hub.HfApi()
    commit = revision
    if not _COMMIT.fullmatch(revision):
        # If the Hub cannot be reached, this is the commit of the last time.
        commit = api.resolve_revision(repo, revision=revision).resolved
        progress.warn(
            f"spec.model.revision: {revision} of hf://{repo} is the commit {commit}; set the "
            "commit as the revision, so that later starts serve the same weights"
        )
        if _is_listed(repo, commit) and (folder := _cached(repo, commit)) is not None:
            return folder
    # The tree has files and folders; only files have a size.
    tree = {one.path: one for one in api.list_repo_tree(repo, revision=commit)}
    shards: tuple[str, ...] = ()
    if _INDEX in tree:
        shards = _shards(Path(hub.hf_hub_download(repo, _INDEX, revision=commit)))
    wanted = (*_FILES, *shards)
    files = [one for one in tree.values() if hasattr(one, "size") and _matches(one.path, wanted)]
    if not any(_matches(one.path, (*_WEIGHTS, *shards)) for one in files):
        raise InputError(
            f"hf://{repo}: the commit {commit} has no model.safetensors, and no other weights are "
            "downloaded; serve a GGUF file with file://, or another model"
        )
    problem = tokenizer_problem(tree.__contains__)
    if problem is not None:
        raise InputError(
            f"hf://{repo}: {problem}, save the weights in the same way, and serve the folder with "
            "file://"
        )
    storage = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    blobs = storage / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    large = [
        one
        for one in files
        if one.lfs is not None
        and _MIN_BYTES <= one.size <= _MAX_BYTES
        and not (blobs / one.lfs.sha256).exists()
    ]
    _require_space(repo, blobs, sum(one.size for one in large))
    total = sum(one.size for one in files)
    with progress.phase(f"download {commit[:12]}", total):
        progress.add(total - sum(one.size for one in large))
        pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="weights")
        try:
            # The first error ends the command, not the last file.
            for done in as_completed(
                [pool.submit(_fetch_blob, repo, commit, one, blobs, progress) for one in large]
            ):
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return Path(hub.snapshot_download(repo, revision=commit, allow_patterns=list(wanted)))


def _fetch_blob(repo: str, commit: str, file: Any, blobs: Path, progress: FetchProgress) -> None:
    """Download a file into the cache, from where an earlier download ended."""
    target = blobs / file.lfs.sha256
    partial = blobs / f"{target.name}{_PARTIAL}"
    with locked(blobs / f"{target.name}.goodput-lock"):
        if target.exists():  # another process was faster
            progress.add(file.size)
            return
        url = hub.hf_hub_url(repo, file.path, revision=commit)
        location = hub.get_hf_file_metadata(url).location
        headers = build_hf_headers()
        if urlsplit(location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # the token is for the Hub alone
        with partial.open("ab") as out:
            done = out.tell()
            if done > file.size:
                out.truncate(0)
                done = 0
            progress.add(done)
            http_get(
                location,
                out,
                resume_size=done,
                headers=headers,
                expected_size=file.size,
                tqdm_class=lambda *_, **__: _ByteCounter(progress),
            )
        if file_digest(partial, lambda _: None) != target.name:
            partial.unlink()
            raise InputError(
                f"hf://{repo}: {file.path} has another checksum than the Hub states, so it was "
                "removed; start again"
            )
        partial.rename(target)


class _ByteCounter:
    """Passes the counts of the library's progress bar on."""

    def __init__(self, progress: FetchProgress) -> None:
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: int) -> None:
        self._progress.add(count)


def _compare(source: str, folder: Path, progress: FetchProgress) -> None:
    """Compare the content of each file with the checksum in the name of its blob.

    Raises:
        InputError: a file is damaged; it is removed, so that the next start downloads it.
    """
    wanted = (*_FILES, *_shards(folder / _INDEX))
    files = [path for path in sorted(folder.iterdir()) if _matches(path.name, wanted)]
    with progress.phase("check the weights", sum(path.stat().st_size for path in files)):
        for path in files:
            # Without symbolic links, the cache does not keep the checksums.
            blob = path.readlink().name if path.is_symlink() else ""
            if len(blob) == _SHA256_CHARACTERS:
                found = file_digest(path, progress.add)
            elif len(blob) == _SHA1_CHARACTERS:
                head = b"blob %d\0" % path.stat().st_size  # as Git does
                found = file_digest(path, progress.add, algorithm="sha1", head=head)
            else:
                continue
            if found != blob:
                path.resolve().unlink()
                path.unlink()
                raise InputError(
                    f"{source}: {path.name} was damaged in the cache and is removed; start again "
                    "to download it"
                )


def _refused(source: str, revision: str, error: Exception) -> InputError:
    """Return the error for an answer of the Hub."""
    remedy = "set HF_TOKEN to the token of an account that may read it"
    if isinstance(error, errors.GatedRepoError):
        return InputError(
            f"{source}: the model is gated; request access at {constants.ENDPOINT}/"
            f"{source.removeprefix('hf://')}, and {remedy}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(
            f"{source}: the Hub has no revision {revision!r} of it; correct spec.model.revision"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return InputError(
            f"{source}: the Hub has no such model, or it is private; check the name, or {remedy}"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in {401, 403}:
        return InputError(f"{source}: the Hub refuses access ({status}); {remedy}")
    if status is not None:
        return InputError(
            f"{source}: the Hub answers with {status}; start again later, and the download "
            "continues where it ended"
        )
    return InputError(
        f"{source}: {constants.ENDPOINT} cannot be reached; check the network and start again"
    )


def _require_space(repo: str, blobs: Path, needed: int) -> None:
    free = shutil.disk_usage(blobs).free
    if needed > free:
        raise InternalError(
            f"hf://{repo}: the download takes {needed / BYTES_PER_GIB:.1f} GiB, but {blobs} has "
            f"only {free / BYTES_PER_GIB:.1f} GiB left; free some space, or set HF_HOME to a "
            "folder of another disk"
        )


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return "/" not in path and any(fnmatchcase(path, pattern) for pattern in patterns)


def _detail(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_DETAIL] or type(error).__name__
