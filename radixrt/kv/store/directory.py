"""The directory of ``--cache-dir``: a folder for each model and machine, and in it one for each
replica, with one owner.

::

    DIR                   mode 0700
      secret              keys the roots of tenants and salts
      FINGERPRINT         a folder for each fingerprint, see radixrt.worker.fingerprint
        model.json        what the fingerprint was made of
        r0                of the first replica
          lock            its owner holds a lock on it (flock)
          journal         which prefix lies in which slot of the pages
          pages           slots of equal size
          pages.1         of the second rank, ...

No symbolic link is followed below DIR. Everything is private to the user.
"""

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import shutil
import stat
import time
from pathlib import Path

import msgspec

from radixrt.base.errors import ConfigError

LOCK_PATIENCE_S = 5.0
"""Time for which a lock is awaited: the owner may be a process of this server that is about to
end."""

_MAX_TRIES = 10
"""A server tries so often to own a folder that others remove meanwhile."""
FINGERPRINT_CHARS = 32
"""Of a fingerprint, in the name of its folder."""
_SECRET_BYTES = 32
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class CacheDirectory:
    """The folder of one replica, which this process owns.

    Attributes:
        path: of the folder.
        secret: keys the roots of tenants and salts: [32].
    """

    def __init__(self, path: Path, fd: int, lock_fd: int, secret: bytes) -> None:
        self.path = path
        self.fd = fd
        self.secret = secret
        self._lock_fd = lock_fd

    @staticmethod
    def own(
        directory: Path,
        parts: dict[str, str],
        replica: int = 0,
        patience_s: float | None = None,
    ) -> "CacheDirectory":
        """Make the folder of a replica, unless it is there, and become its owner.

        Args:
            parts: what the bits of the KV depend on, by name.

        Raises:
            ConfigError: another process owns it, or others can read it.
            OSError: it cannot be made.
        """
        path = directory / fingerprint_of(parts)[:FINGERPRINT_CHARS] / f"r{replica}"
        top = _enter(directory, None)
        try:
            secret = _read_secret(top)
            fd, lock_fd = _own_folder(top, path, parts, LOCK_PATIENCE_S if patience_s is None else patience_s)  # fmt: skip
        finally:
            os.close(top)
        with contextlib.suppress(OSError):  # the disk may be full
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, str(os.getpid()).encode(), 0)
        return CacheDirectory(path, fd, lock_fd, secret)

    def close(self) -> None:
        """Give the folder up."""
        os.close(self._lock_fd)
        os.close(self.fd)

    def root_digest(self, root: bytes) -> bytes:
        """What stands for the empty prefix of a tenant and salt: [32]. Without the secret, nobody
        can compute it."""
        return root_digest(self.secret, root)

    # ------------------------------------------------------------ the quota of the whole directory

    def bytes_of_others(self) -> int:
        """Disk space of the folders of other models, machines and replicas."""
        return sum(used_bytes(folder) for folder in self._others())

    def drop_oldest(self, num_replicas: int = 1) -> bool:
        """Remove the folder of another fingerprint, or of a replica beyond those that there are,
        that nobody owns, the one that was used longest ago; False if there is none."""
        others = [
            folder
            for folder in self._others()
            if folder.parent != self.path.parent or int(folder.name[1:]) >= num_replicas
        ]
        for folder in sorted(others, key=_last_use):
            with contextlib.suppress(OSError):
                if _remove(folder):
                    return True
        return False

    def _others(self) -> list[Path]:
        """The folders of replicas beside this one."""
        return [one for one in replica_folders(self.path.parent.parent) if one != self.path]


def _own_folder(top: int, path: Path, parts: dict[str, str], patience_s: float) -> tuple[int, int]:
    """Make the folder of a replica, unless it is there, and lock it; returns it and its lock.

    Another server may remove it until it is locked; then it is made again.
    """
    for _ in range(_MAX_TRIES):
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as closed:
            model = _enter(Path(path.parent.name), top)
            closed.callback(os.close, model)
            _write_once(model, "model.json", msgspec.json.encode(parts))
            returned = closed.enter_context(contextlib.ExitStack())
            fd = _enter(Path(path.name), model)
            returned.callback(os.close, fd)
            lock_fd = open_private("lock", fd)
            returned.callback(os.close, lock_fd)
            if not _lock(lock_fd, patience_s):
                owner = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise ConfigError(
                    f"--cache-dir {path.parent.parent}: process {owner} uses the cache of this model ({path}). Stop it, or give "
                    "this server another directory."
                )
            if _is_lock_of(lock_fd, path):
                _write_once(model, "model.json", msgspec.json.encode(parts))
                returned.pop_all()
                return fd, lock_fd
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _is_lock_of(lock_fd: int, folder: Path) -> bool:
    """Whether a lock is that of a folder, and not of one that was removed."""
    try:
        there = (folder / "lock").lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(lock_fd), there)


def _last_use(folder: Path) -> float:
    try:
        return (folder / "lock").lstat().st_mtime
    except OSError:
        return 0.0


def _remove(folder: Path) -> bool:
    """Remove the folder of a replica; False: another process owns it.

    The lock goes last: who has made another one finds nothing else of the old folder.
    """
    fd = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not (_lock(fd, 0.0) and _is_lock_of(fd, folder)):
            return False
        for entry in sorted(folder.iterdir(), key=lambda one: one.name == "lock"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):  # another server begins there
        folder.rmdir()
        if not replica_folders(folder.parent.parent, folder.parent.name):
            (folder.parent / "model.json").unlink()
            folder.parent.rmdir()
    return True


def root_digest(secret: bytes, root: bytes) -> bytes:
    """The digest of the empty prefix below a root: [32]."""
    return hmac.digest(secret, root, hashlib.sha256)


def fingerprint_of(parts: dict[str, str]) -> str:
    """The fingerprint of what the bits of the KV depend on: 64 hex digits.

    >>> fingerprint_of({"dtype": "bfloat16"}) == fingerprint_of({"dtype": "float32"})
    False
    """
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()


def replica_folders(directory: Path, fingerprint: str = "*") -> list[Path]:
    """The folders of all replicas of one fingerprint, or of all, in a directory of
    ``--cache-dir``."""
    found = [one for one in sorted(directory.glob(f"{fingerprint}/r*")) if one.name[1:].isdigit()]
    own = [one for one in found if not (one.is_symlink() or one.parent.is_symlink())]
    return [one for one in own if (one / "lock").is_file()]


def used_bytes(folder: Path) -> int:
    """Disk space of the files in a folder; those of a file with holes count as much as they
    have."""
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def open_private(name: str, folder_fd: int, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a file of mode 0600 in a folder; no symbolic link is followed.

    Raises:
        OSError: it is a link, or cannot be opened.
    """
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)


def _enter(path: Path, parent_fd: int | None) -> int:
    """Make a folder of mode 0700, unless it is there, and open it.

    Raises:
        ConfigError: others may enter it, or it belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        if parent_fd is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(path, 0o700, dir_fd=parent_fd)
    if parent_fd is None and path.is_symlink():
        raise OSError(errno.ELOOP, "symbolic links are not followed; name the folder itself")
    fd = os.open(path, _FOLDER | os.O_CLOEXEC, dir_fd=parent_fd)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise ConfigError(
            f"--cache-dir: {path} holds prompts, and must belong to this user and be closed to others: chmod 700 {path}."
        )
    return fd


def _read_secret(top: int) -> bytes:
    """The secret of a directory, which is made if it has none."""
    made = secrets.token_bytes(_SECRET_BYTES)
    _write_once(top, "secret", made)
    fd = open_private("secret", top, os.O_RDONLY)
    try:
        secret = os.read(fd, _SECRET_BYTES + 1)
    finally:
        os.close(fd)
    if len(secret) == _SECRET_BYTES:
        return secret
    os.unlink("secret", dir_fd=top)  # torn: nothing that was written with another is found again
    _write_once(top, "secret", made)
    return made


def _write_once(folder_fd: int, name: str, content: bytes) -> None:
    """Write a file, whole, unless it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        return
    part = f"{name}.{os.getpid()}"
    fd = open_private(part, folder_fd)
    try:
        if os.write(fd, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with contextlib.suppress(FileExistsError):
            os.link(part, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    finally:
        os.close(fd)
        os.unlink(part, dir_fd=folder_fd)


def _lock(fd: int, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
        else:
            return True
