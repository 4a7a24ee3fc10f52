"""Translates settings of vLLM, SGLang, llama.cpp and Ollama into those of radixrt, by the table in
:mod:`radixrt.base.settings.peers`."""

import argparse
import json
import logging
from collections.abc import Mapping
from typing import Any

from radixrt.base.errors import ConfigError
from radixrt.base.settings import peers
from radixrt.base.settings.setting import Setting, flag_of

log = logging.getLogger(__name__)

_DEST = "peer:"
"""Beginning of the names of peers' flags in a parsed command line, where a name such as ``model``
may have another meaning."""

_UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
"""The units of numbers as vLLM writes them: 32k, 32K."""


def key_of(flag: str) -> str:
    """The name of a flag in settings files and in ``LLM``.

    >>> key_of("--max-model-len"), key_of("-ngl")
    ('max_model_len', 'ngl')
    """
    return flag.lstrip("-").replace("-", "_")


def _by_key(table: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The flag and the left side of the table, by the name in settings files."""
    return {key_of(flag): (flag, left) for left, flags in table.items() for flag in flags.split()}


_ALIASES = _by_key(peers.ALIASES)
_REFUSED = _by_key(peers.REFUSED)
_IGNORED = _by_key({why: " ".join(both).replace("=", "") for why, both in peers.IGNORED.items()})
_CONSTANTS = {key_of(flag): (flag, *setting) for flag, setting in peers.CONSTANTS.items()}
_OFF = {key_of(flag): setting for flag, setting in peers.OFF.items()}
_NEUTRAL = {(key_of(f), value) for value, flags in peers.NEUTRAL.items() for f in flags.split()}

PEER_NAMES = frozenset({*_ALIASES, *_CONSTANTS, *_IGNORED, *_REFUSED})
"""Every name of the table, as in settings files."""


def add_peer_flags(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    """Declare the flags of the table that the parser does not have, without help."""
    flags: dict[str, Any] = dict.fromkeys(" ".join(peers.REFUSED.values()).split(), "*")
    for switches, valued in peers.IGNORED.values():
        flags |= dict.fromkeys(switches.split(), 0)
        flags |= {f.rstrip("="): "?" if f.endswith("=") else None for f in valued.split()}
    flags |= dict.fromkeys(peers.CONSTANTS, 0)
    for name, aliases in peers.ALIASES.items():
        setting = settings[name]
        nargs = 0 if setting.type is bool else "+" if setting.several else None
        flags |= dict.fromkeys(aliases.split(), nargs)
    for flag, nargs in flags.items():
        if flag in parser._option_string_actions:
            continue
        kind: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        kind |= {"action": "store_true"} if nargs == 0 else {"nargs": nargs}
        if nargs == "?":
            kind["const"] = True
        if key_of(flag) in settings:  # -tp
            kind["type"] = settings[key_of(flag)].type
        parser.add_argument(flag, dest=_DEST + key_of(flag), **kind)


def peer_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The peers' settings of a parsed command line."""
    given = {name.removeprefix(_DEST): value for name, value in vars(arguments).items() if name.startswith(_DEST)}  # fmt: skip
    return {
        name: " ".join(value) or True if isinstance(value, list) else value
        for name, value in given.items()
    }


def translated(given: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Settings under our names and with our values; unknown names stay. Logs a note for each that
    has no effect.

    Args:
        settings: all of ours, by name. Where one is given under its own name, too, that holds.

    Raises:
        ConfigError: there is nothing of the kind here; says what there is.
    """
    result: dict[str, Any] = {}
    own = {}
    for name, value in given.items():
        if name in settings:
            own[name] = _value_of(settings[name], value)
        elif name in _ALIASES:
            flag, ours = _ALIASES[name]
            if value is not None:
                result[ours] = _value_of(settings[ours], _read(flag, settings[ours], value))
        elif name in _CONSTANTS:
            _, ours, constant = _CONSTANTS[name]
            if value:
                result[ours] = constant
        elif name in _IGNORED:
            if name in _OFF and str(value).lower() in ("0", "false"):
                ours, constant = _OFF[name]
                result[ours] = constant
            elif value not in (None, False):
                flag, reason = _IGNORED[name]
                log.warning("%s has no effect: %s.", flag, reason)
        elif name in _REFUSED:
            flag, answer = _REFUSED[name]
            if str(value).lower() not in ("none", "false", "{}") and (name, str(value)) not in _NEUTRAL:  # fmt: skip
                raise ConfigError(f"{flag}: {answer}.")
        else:
            own[name] = value
    return result | own


def _read(flag: str, setting: Setting, value: Any) -> Any:
    """The value of an alias in the type of our setting; raises ConfigError if it is none."""
    if flag in ("--hf-repo", "-hf", "-hfr"):
        return f"hf:{value}"
    if isinstance(value, list) or (isinstance(value, str) and value.startswith("[")):
        try:
            value = ",".join(json.loads(value) if isinstance(value, str) else value)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{flag}: {value!r:.80} is not a list of texts.") from error
    if not isinstance(value, str) or setting.type not in (int, float):
        return value
    if value in peers.VALUES.get(setting.name, ()):
        return value
    try:
        unit = _UNITS.get(value[-1:], 1) if setting.type is int else 1
        return setting.type(value) if unit == 1 else int(float(value[:-1]) * unit)
    except ValueError:
        raise ConfigError(f"{flag}: {value!r:.80} is not a number.") from None


def _value_of(setting: Setting, value: Any) -> Any:
    """Our value of the same meaning; raises ConfigError if there is none."""
    text = "none" if value is None else str(value)
    if text in setting.choices or setting.type is bool:
        return value
    if text in (values := peers.VALUES.get(setting.name, {})):
        return values[text]
    reason, defaulted = peers.DEFAULTED.get(setting.name, ("", ""))
    if text in defaulted.split():
        if value is not None:
            log.warning("%s %s is %s auto here: %s.", setting.flag, text, setting.flag, reason)
        return "auto"
    answer, refused = peers.ANSWERS.get(setting.name, ("", ""))
    if text in refused.split():
        raise ConfigError(f"{flag_of(setting.name)} {text} is not supported: {answer}.")
    return value
