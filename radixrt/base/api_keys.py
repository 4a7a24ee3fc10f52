"""API keys: the file that declares them, their digests, and new keys.

A file holds digests only. A plain SHA-256 suffices: keys are random and of 256 bits, so no search
finds one, and the slow hashes that passwords need would cost each request milliseconds.
"""

import hashlib
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError

KEYS_VARIABLE = "RADIXRT_API_KEYS"
"""Environment variable: the name of a key file, or its content as JSON."""

KEY_VARIABLE = "RADIXRT_API_KEY"
"""Environment variable: one key, an admin's."""

Role = Literal["user", "admin"]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._@-]{1,64}\Z")]
Digest = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on the requests of one key. None: no bound."""

    max_parallel_requests: Count | None = None
    """HTTP requests in flight. A batch counts as one, and runs at most this number of its prompts
    at a time."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Tokens of prompts and answers."""
    max_tokens: Count | None = None
    """Most tokens of one answer."""
    max_pinned_fraction: Fraction | None = None
    """Share of the KV pool that the key may pin at a time."""
    max_cached_fraction: Fraction | None = None
    """Share of the KV pool above which cached KV of the key is evicted before that of others."""
    models: list[str] | None = None
    """Names of the models that the key may use."""

    def over(self, defaults: "KeyLimits") -> "KeyLimits":
        """These limits, with those of ``defaults`` where there is none."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}  # fmt: skip
        return msgspec.structs.replace(defaults, **given)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of the file."""

    name: Name
    hash: Digest | list[Digest]
    """Several while a key is being replaced."""
    role: Role = "user"
    weight: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    """Share of the engine that the key's requests get while those of other keys wait, relative to
    the other weights."""
    cache_group: Name | None = None
    """Keys of one group share cached prefixes; by default a key shares none."""
    limits: KeyLimits = KeyLimits()

    @property
    def digests(self) -> list[str]:
        return [self.hash] if isinstance(self.hash, str) else self.hash


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a key file."""

    keys: list[ApiKey]
    limits: KeyLimits = KeyLimits()
    """The limits of keys that do not set their own."""


@dataclass(frozen=True)
class KeySource:
    """The places that keys are read from."""

    file: Path | None = None
    json: str | None = None
    """The content of a file."""
    plain: tuple[str, ...] = ()
    """Keys of admins, as clients send them."""

    @staticmethod
    def from_config(config: ServerConfig, environment: Mapping[str, str]) -> "KeySource":
        """The flags, and the environment for those that are not given."""
        declared = config.api_keys or environment.get(KEYS_VARIABLE) or None
        plain = config.api_key or environment.get(KEY_VARIABLE) or None
        is_json = declared is not None and declared.lstrip().startswith("{")
        return KeySource(
            file=None if declared is None or is_json else Path(declared),
            json=declared if is_json else None,
            plain=() if plain is None else (plain,),
        )

    @property
    def is_empty(self) -> bool:
        return self == KeySource()

    def load(self) -> list[ApiKey]:
        """The declared keys, without the plain ones.

        Raises:
            ConfigError: the file can't be read, or does not declare at least one key properly.
        """
        if self.json is not None:
            return _keys(self.json, KEYS_VARIABLE, is_toml=False)
        if self.file is None:
            return []
        try:
            text = self.file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The key file {self.file} can't be read: {error}.") from error
        return _keys(text, f"The key file {self.file}", is_toml=not text.lstrip().startswith("{"))


def _keys(text: str, where: str, *, is_toml: bool) -> list[ApiKey]:
    try:
        content = tomllib.loads(text) if is_toml else msgspec.json.decode(text)
        declared = msgspec.convert(content, KeyFile)
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid: {error}. See docs/security.md.") from error
    if not declared.keys:
        raise ConfigError(f"{where} holds no key. Make one: radixrt key new NAME.")
    _check_unique([key.name for key in declared.keys], where)
    _check_unique([digest for key in declared.keys for digest in key.digests], where)
    return [
        msgspec.structs.replace(key, limits=key.limits.over(declared.limits))
        for key in declared.keys
    ]


def _check_unique(values: list[str], where: str) -> None:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where} declares {twice} twice; each name and each hash may stand there once.")  # fmt: skip


def digest_of(key: str | bytes) -> str:
    """The digest of a key, as a key file has it."""
    return "sha256:" + hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def new_key(name: str, role: Role) -> tuple[str, ApiKey]:
    """A random key of 256 bits, and its entry for a key file.

    Raises:
        ConfigError: the name can't stand in a file.
    """
    key = f"rx-{secrets.token_urlsafe(32)}"
    try:
        return key, msgspec.convert({"name": name, "hash": digest_of(key), "role": role}, ApiKey)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{name!r:.80} can't be the name of a key: use 1 to 64 letters, digits and . _ @ -."
        ) from error
