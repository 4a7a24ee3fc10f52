"""Gives LoRA adapters their places in the workers, counts the sequences that use each, and loads and
unloads them under traffic.

Requests name an adapter by its digest, so a sequence keeps the adapter that its client asked for
when the name is given to other bytes. An adapter that is unloaded leaves its place when the last
sequence that uses it has ended.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from radixrt.base.errors import RequestError
from radixrt.messages.adapters import (
    NO_ADAPTER,
    AdapterInfo,
    AdapterRead,
    LoadAdapter,
    PutAdapter,
)
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.calls import LoadAdapterCall, UnloadAdapterCall
from radixrt.messages.ids import TokenIds
from radixrt.messages.requests import RequestOptions
from radixrt.scheduler.radix.key_ids import MAX_NAMESPACES, key_ids, last_occurrence
from radixrt.scheduler.sequence import Sequence

Loaded = Callable[[AdapterInfo | RequestError], None]
"""Hears of the end of a load."""


@dataclass(eq=False, slots=True)
class _Place:
    digest: str
    invocation: tuple[int, ...]
    users: int = 0
    """Sequences that wait or run."""


@dataclass(eq=False, slots=True)
class _Load:
    """An adapter that the ranks are reading."""

    call: LoadAdapterCall
    done: Loaded
    ranks_to_read: int
    digests: set[str]
    invocation: tuple[int, ...] = ()
    error: str | None = None


class AdapterRegistry:
    """The adapters of the workers; :meth:`take_orders` returns the messages for them.

    Args:
        infos: those that the workers have loaded.
        kept: file that tells the workers of the next engine what to load; None: nobody reads it.
    """

    def __init__(
        self,
        infos: tuple[AdapterInfo, ...] = (),
        num_places: int = 0,
        num_ranks: int = 1,
        kept: Path | None = None,
    ) -> None:
        self._num_places, self._num_ranks = num_places, num_ranks
        self._kept = kept
        self._by_name = {info.name: info for info in infos}
        self._namespaces: dict[str, int] = {}
        """Of the ids of each digest of an activated adapter. A digest keeps its own, because KV of
        it may be in the tree."""
        self._places: dict[int, _Place] = {}
        for info in infos:
            self._take(info.place, info.digest, info.invocation)
        self._free = [place for place in range(num_places) if place not in self._places]
        self._loads: dict[int, _Load] = {}
        self._orders: list[LoadAdapter | PutAdapter] = []

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The adapters that new requests may use."""
        return tuple(self._by_name.values())

    def take_orders(self) -> list[LoadAdapter | PutAdapter]:
        """Messages for every worker, in this order, before any plan made from now on."""
        orders, self._orders = self._orders, []
        return orders

    # ------------------------------------------------------------ sequences

    def refusal(self, options: RequestOptions) -> str | None:
        """Why a sequence can't have its adapter; None if it can: also one that was unloaded, or
        replaced under its name, while the request was on its way, if others still use it."""
        digest = options.root.adapter
        if not digest or self._place_of(digest) is not None:
            return None
        name = options.adapter_name or digest
        return f"The adapter {name} (digest {digest[:12]}) is not loaded any more."

    def use(self, sequence: Sequence) -> None:
        """Give a sequence that is accepted its adapter. Where the invocation of an activated one is
        not in the prompt, it works nowhere, as in peft."""
        digest = sequence.options.root.adapter
        if not digest:
            return
        number = self._place_of(digest)
        assert number is not None, "the adapter of an accepted sequence is loaded"
        place = self._places[number]
        place.users += 1
        sequence.place = number
        if place.invocation:
            prompt = sequence.tokens[: sequence.num_prompt]
            start = last_occurrence(prompt, place.invocation)
            sequence.activate(start, self._namespaces[digest])

    def place_in_tree(self, tokens: TokenIds, root: CacheRoot) -> tuple[TokenIds, CacheRoot]:
        """The ids and the root under which a prompt would be in the tree."""
        number = self._place_of(root.adapter)
        if number is None or not (invocation := self._places[number].invocation):
            return tokens, root
        start = last_occurrence(tokens, invocation)
        ids = tokens.copy()
        if start >= 0:
            ids[start:] = key_ids(ids[start:], self._namespaces[root.adapter])
        return ids, root._replace(adapter="")

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if sequence.place != NO_ADAPTER:
            self._places[sequence.place].users -= 1
            self._free_if_unused(sequence.place)

    @property
    def users(self) -> dict[int, int]:
        """Sequences of each place in use."""
        return {number: place.users for number, place in self._places.items()}

    # ------------------------------------------------------------ loading and unloading

    def load(self, call: LoadAdapterCall, done: Loaded) -> None:
        """Have an adapter loaded.

        Raises:
            RequestError: the name is in use, or there is no place.
        """
        if not self._num_places:
            raise RequestError(
                "There are no places for adapters: start with --max-loras, or with --lora."
            )
        if call.name in self._by_name and not call.replaces:
            raise RequestError(
                f"An adapter {call.name} is loaded already; load_inplace: true replaces it.",
                param="lora_name",
            )
        if len(self._namespaces) >= MAX_NAMESPACES:
            raise RequestError(
                "Too many activated adapters were loaded since the start; start the server again.",
                status=409,
            )
        if not self._free:
            raise RequestError(
                f"All {self._num_places} places for adapters (--max-loras) are taken: unload one first; "
                "its place is free when its last request has ended.",
                status=409,
            )
        place = self._free.pop(0)
        self._loads[place] = _Load(call, done, self._num_ranks, set())
        self._orders.append(LoadAdapter(place=place, path=call.path))

    def read(self, message: AdapterRead) -> None:
        """Note the answer of one rank. When all have read the same bytes, new requests may use
        the adapter."""
        load = self._loads[message.place]
        load.ranks_to_read -= 1
        load.error = load.error or message.error
        if message.digest:
            load.digests.add(message.digest)
            load.invocation = message.invocation
        if load.ranks_to_read:
            return
        del self._loads[message.place]
        if load.error is None and len(load.digests) > 1:
            load.error = "The adapter was replaced while the ranks of --tp read it; load it again."
        if load.error is not None:
            self._free.insert(0, message.place)
            load.done(RequestError(load.error, param="lora_path"))
            return
        load.done(self._loaded(load, load.digests.pop(), message.place))

    def _loaded(self, load: _Load, digest: str, place: int) -> AdapterInfo:
        call = load.call
        known = self._place_of(digest)
        if known is None:
            self._orders.append(PutAdapter(place=place))
            self._take(place, digest, load.invocation)
        else:
            self._free.insert(0, place)
            place = known
        info = AdapterInfo(
            name=call.name,
            digest=digest,
            path=call.path,
            place=place,
            invocation=load.invocation,
        )
        replaced = self._by_name.pop(call.name, None)
        self._by_name[call.name] = info
        if replaced is not None:
            self._free_if_unused(replaced.place)
        self._keep()
        return info

    def unload(self, call: UnloadAdapterCall) -> AdapterInfo:
        """Let an adapter go.

        Raises:
            RequestError: there is none of this name.
        """
        info = self._by_name.pop(call.name, None)
        if info is None:
            raise RequestError(f"No adapter {call.name} is loaded.", status=404, param="lora_name")
        self._free_if_unused(info.place)
        self._keep()
        return info

    def _take(self, place: int, digest: str, invocation: tuple[int, ...]) -> None:
        self._places[place] = _Place(digest, invocation)
        if invocation:
            self._namespaces.setdefault(digest, len(self._namespaces))

    def _place_of(self, digest: str) -> int | None:
        found = (number for number, place in self._places.items() if place.digest == digest)
        return next(found, None)

    def _free_if_unused(self, number: int) -> None:
        place = self._places[number]
        is_named = any(info.place == number for info in self._by_name.values())
        if not place.users and not is_named:
            del self._places[number]
            self._free.append(number)

    def _keep(self) -> None:
        if self._kept is not None:
            names = {info.name: info.path for info in self._by_name.values()}
            new = self._kept.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(names))
            new.replace(self._kept)
