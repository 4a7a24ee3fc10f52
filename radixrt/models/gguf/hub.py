"""Downloads GGUF files of the hub, named ``hf:USER/REPO:QUANTIZATION``, into the hub's local cache.

The form is that of llama.cpp's ``-hf`` and Ollama's ``hf.co/``. A model that was split is
downloaded with all its parts.
"""

import glob
import logging
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn, TypeVar

from radixrt.base.errors import ConfigError, NotCachedError
from radixrt.device.machine import OTHER_BYTES, available_memory
from radixrt.models.gguf.form import PART, import_gguf
from radixrt.models.refusals import not_yet

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo

log = logging.getLogger(__name__)

File = TypeVar("File", str, Path)

PREFIX = "hf:"
_NAME = re.compile(r"hf:([^/:\s]+/[^/:\s]+)(?::(\S+))?")
_DEFAULT = "Q4_K_M"
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_\w+)?|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_\w+)?))(?=[-.]|$)",
    re.IGNORECASE,
)
_NOT_MODELS = ("mmproj", "imatrix")
"""Beginnings of the names of other GGUF files: parts of models that see, and statistics for
quantizing."""


def hub_file(
    name: str,
    flag: str,
    *,
    download: bool = True,
    check_room: bool = False,
    progress: type | None = None,
) -> Path:
    """The GGUF file that ``name`` stands for, or the first of its files; downloaded unless the
    cache has it.

    Without a quantization it is Q4_K_M, or the only one that the repository has. If the hub cannot
    be asked, the newest copy in the cache is taken, with a warning.

    Args:
        name: ``hf:USER/REPO``, ``hf:USER/REPO:QUANTIZATION`` or ``hf:USER/REPO:FILE``.
        flag: the setting that errors name.
        download: otherwise the cache must have it.
        check_room: its weights come into the memory of this machine as they are in the file.
        progress: class of tqdm that is told the bytes of the download.

    Raises:
        NotCachedError: it would have to be downloaded.
        ConfigError: it does not fit the memory, or the repository or the quantization does not
            exist, or cannot be downloaded.
    """
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise ConfigError(
            f"{flag} {name} is no name of a GGUF file on the hub; the form is hf:USER/REPO:{_DEFAULT}."
        )
    repository, wanted = parts.groups()
    import_gguf(name)  # before gigabytes are downloaded in vain
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise ConfigError(f"{flag} {name} needs huggingface_hub, which is not installed.") from None
    try:
        info = HfApi().model_info(repository, files_metadata=True)
        siblings = info.siblings or []
        models = gguf_models(file.rfilename for file in siblings)
        files = _choose(models, wanted, repository)
        sizes = {file.rfilename: file.size or 0 for file in siblings}
        _check_served(repository, (info.gguf or {}).get("architecture"))
        if check_room:
            _check_room(repository, models, files, sizes)
        if not download and _cached(repository, wanted) is None:
            size = sum(sizes[file] for file in files)
            raise NotCachedError(
                f"{name} is not in the hub's cache on this machine: {size / 1e9:.1f} GB."
            )
        patterns = [glob.escape(file) for file in (*files, *_tower(sizes, files[0]))]
        folder = snapshot_download(repository, allow_patterns=patterns, tqdm_class=progress)
        return Path(folder) / files[0]
    except ConfigError:
        raise
    except Exception as error:  # any failure of the network, the hub or the id
        cached = _cached(repository, wanted)
        if cached is None:
            refuse(repository, error, f"{flag} {name}")
        log.warning("The hub cannot be asked (%s); serving the copy in its cache.", _reason(error))
        return cached


def gguf_models(files: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among the files of a repository, each with its files in their order.

    Returns:
        by quantization, in capitals; by the name of the first file where its name has none, or
        another model has the same.

    >>> gguf_models(["README.md", "a-Q8_0.gguf", "big/b.q4_k_m-00001-of-00002.gguf", "big/b.q4_k_m-00002-of-00002.gguf"])
    {'Q8_0': ['a-Q8_0.gguf'], 'Q4_K_M': ['big/b.q4_k_m-00001-of-00002.gguf', 'big/b.q4_k_m-00002-of-00002.gguf']}
    >>> gguf_models(["a-Q8_0.gguf", "b-Q8_0.gguf", "mmproj-F16.gguf", "c.gguf"])
    {'a-Q8_0.gguf': ['a-Q8_0.gguf'], 'b-Q8_0.gguf': ['b-Q8_0.gguf'], 'c.gguf': ['c.gguf']}
    """
    models: dict[str, list[str]] = defaultdict(list)
    for file in sorted(files):
        name = PurePosixPath(file).name
        if name.endswith(".gguf") and not name.startswith(_NOT_MODELS):
            models[PART.sub("", file).removesuffix(".gguf")].append(file)
    quantizations: dict[str, list[list[str]]] = defaultdict(list)
    for stem, parts in models.items():
        found = _QUANTIZATION.findall(PurePosixPath(stem).name)
        quantizations[found[-1].upper() if found else parts[0]].append(parts)
    return {
        quantization if len(having) == 1 else parts[0]: parts
        for quantization, having in quantizations.items()
        for parts in having
    }


def _choose(models: dict[str, list[File]], wanted: str | None, repository: str) -> list[File]:
    """The files of the wanted model.

    Raises:
        ConfigError: the repository has no such model; the message lists those there are.
    """
    if not models:
        raise ConfigError(
            f"{repository} has no GGUF files; for safetensors give --model-path {repository}, without hf:."
        )
    if wanted is None and len(models) == 1:
        return next(iter(models.values()))
    wanted = wanted or _DEFAULT
    for quantization, files in models.items():
        if wanted.casefold() == quantization.casefold() or f"/{files[0]}".endswith(f"/{wanted}"):
            return files
    raise ConfigError(
        f"{repository} has no GGUF file {wanted}; choose one of these: "
        + ", ".join(f"{PREFIX}{repository}:{quantization}" for quantization in sorted(models))
    )


def _tower(files: Iterable[str], model: str) -> list[str]:
    """The file of the vision tower in a model's folder, if there is one; of several that differ in
    their dtypes the first by name."""
    folder = PurePosixPath(model).parent
    found = [name for name in files if PurePosixPath(name).match("mmproj*.gguf")]
    return sorted(name for name in found if PurePosixPath(name).parent == folder)[:1]


def _check_served(repository: str, architecture: str | None) -> None:
    """
    Args:
        architecture: what the hub has read in a file of the repository; None: it has not.

    Raises:
        ConfigError: it is not served.
    """
    from radixrt.models.gguf.config import FAMILIES  # numpy, which other names need not import

    if architecture is not None and architecture not in FAMILIES:
        raise ConfigError(f"{repository} cannot be served. {not_yet(architecture)}")


def _check_room(
    repository: str, models: dict[str, list[str]], chosen: list[str], sizes: Mapping[str, int]
) -> None:
    """Check that a model fits the memory before it is downloaded.

    Raises:
        ConfigError: it does not; the message names the largest model of the repository that does.
    """
    room = available_memory() - OTHER_BYTES
    size_of = {name: sum(sizes[file] for file in files) for name, files in models.items()}
    needed = sum(sizes[file] for file in chosen)
    if needed <= room:
        return
    fitting = {name: size for name, size in size_of.items() if 0 < size <= room}
    best = max(fitting, key=lambda name: fitting[name], default=None)
    advice = (
        f"the largest of this repository that fits is {PREFIX}{repository}:{best} ({fitting[best] / 1e9:.1f} GB)."
        if best is not None
        else "no file of this repository fits: choose a smaller model."
    )
    raise ConfigError(
        f"{repository}/{chosen[0]} has {needed / 1e9:.1f} GB of weights, and there is room for {max(0, room) / 1e9:.1f} GB in "
        f"memory; {advice}"
    )


def cached_models(revisions: Iterable["CachedRevisionInfo"]) -> dict[str, list[Path]]:
    """The GGUF models of a repository in the hub's cache, each in its newest revision, as
    :func:`gguf_models` names them.

    A model with missing files is among them only if no revision has all.
    """
    models: dict[str, list[Path]] = {}
    for revision in sorted(revisions, key=lambda revision: -revision.last_modified):
        folder = revision.snapshot_path
        found = (path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
        for name, files in gguf_models(found).items():
            paths = [folder / file for file in files]
            if name not in models or (_is_complete(paths) and not _is_complete(models[name])):
                models[name] = paths
    return models


def _is_complete(files: list[Path]) -> bool:
    part = PART.search(files[0].name)
    return all(file.is_file() for file in files) and (part is None or len(files) == int(part[2]))


def _cached(repository: str, wanted: str | None) -> Path | None:
    """The first file of the wanted model, if the hub's cache has all of them."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_id == repository]
    except CacheNotFound:
        return None
    models = cached_models(revision for repo in repos for revision in repo.revisions)
    try:
        complete = {name: files for name, files in models.items() if _is_complete(files)}
        return _choose(complete, wanted, repository)[0]
    except ConfigError:
        return None


def refuse(repository: str, error: Exception, failure: str) -> NoReturn:
    """Say why a repository cannot be downloaded, and what to do.

    Raises:
        ConfigError: always.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)  # type: ignore[arg-type]
    not_here = "is not in the hub's cache on this machine, and"
    advice = f"cannot be downloaded, and is not in the hub's cache ({_reason(error)})"
    if isinstance(error, GatedRepoError):
        page = f"{constants.ENDPOINT}/{repository}"
        advice = f"is gated: accept its terms at {page}, then log in with `hf auth login` or set HF_TOKEN"
    elif isinstance(error, RepositoryNotFoundError):
        advice = "does not exist on the hub, or is private: check the name, or log in with `hf auth login` or HF_TOKEN"
    elif any(type(cause).__name__ == "OfflineModeIsEnabled" for cause in causes):
        advice = f"{not_here} HF_HUB_OFFLINE keeps it from being downloaded: unset it, or give a folder or a GGUF file"
    elif any(
        isinstance(cause, ConnectionError | TimeoutError | socket.gaierror) for cause in causes
    ) or any(
        "Connect" in type(cause).__name__ or "Timeout" in type(cause).__name__ for cause in causes
    ):
        advice = (
            f"{not_here} the hub cannot be reached at {constants.ENDPOINT}: check the network (HF_ENDPOINT names a mirror), or give "
            "a folder or a GGUF file"
        )
    raise ConfigError(f"{failure} {advice}.") from error


def _reason(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"
