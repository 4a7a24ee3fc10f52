"""Loads LoRA adapters: those of the settings before the engine is ready, further ones beside the
steps."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.settings.adapters import named_adapters
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.messages.adapters import AdapterInfo, AdapterRead, LoadAdapter
from radixrt.models.adapters import ModelAdapters
from radixrt.models.decoder import CausalLM

log = logging.getLogger(__name__)


class AdapterLoader:
    """The adapters of a worker.

    Args:
        report: called with what was read, from another thread.
    """

    def __init__(self, adapters: ModelAdapters, report: Callable[[AdapterRead], None]) -> None:
        self.adapters = adapters
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def load(self, message: LoadAdapter) -> None:
        """Begin to read an adapter and to write it into its place."""
        self._thread.submit(self._load, message)

    def put(self) -> bool:
        """Let the layers compute with the adapters that are written; returns whether some have other
        stacks now."""
        return self.adapters.attach()

    def _load(self, message: LoadAdapter) -> None:
        try:
            adapter = self.adapters.read(Path(message.path))
            self.adapters.write(message.place, adapter)
        except ConfigError as error:
            self._report(AdapterRead(place=message.place, error=str(error)))
        except Exception as error:  # a defect; the engine goes on without the adapter
            log.exception("An adapter could not be read.")
            self._report(AdapterRead(place=message.place, error=f"Unexpected error: {error!r}"))
        else:
            self._report(
                AdapterRead(
                    place=message.place, digest=adapter.digest, invocation=adapter.invocation
                )
            )


def make_adapters(
    config: ServerConfig, model: CausalLM, kernels: LayerKernels
) -> ModelAdapters | None:
    """Places for adapters; None where the settings want none.

    Raises:
        ConfigError: there are no kernels for adapters.
    """
    places = config.num_adapter_places
    if not places:
        return None
    if kernels.lora is None:
        raise ConfigError(
            "LoRA adapters are computed by the native kernels of the CPU, which are missing here, or by Triton on a GPU: "
            "build the kernels (make kernels), or merge the adapter into the checkpoint."
        )
    return ModelAdapters(model, places, config.max_lora_rank, kernels.lora)


def load_at_start(
    config: ServerConfig, adapters: ModelAdapters, kept: Path | None
) -> tuple[AdapterInfo, ...]:
    """Load the adapters of the settings or, after a restart, those that were loaded at its end.

    Args:
        kept: the file in which the scheduler keeps their names and paths; None: there is none.

    Raises:
        ConfigError: an adapter of the settings cannot be served.
    """
    wanted, is_restart = named_adapters(config.lora), False
    if kept is not None and kept.exists():
        is_restart = True
        wanted = msgspec.json.decode(kept.read_bytes(), type=dict[str, str])
    places: dict[str, int] = {}
    found = []
    for name, path in wanted.items():
        try:
            adapter = adapters.read(Path(path))
        except ConfigError as error:
            if not is_restart:
                raise
            log.error("The adapter %s is not loaded again: %s", name, error)
            continue
        if adapter.digest not in places:
            places[adapter.digest] = len(places)
            adapters.put(places[adapter.digest], adapter)
        place = places[adapter.digest]
        found.append(
            AdapterInfo(
                name=name,
                digest=adapter.digest,
                path=path,
                place=place,
                invocation=adapter.invocation,
            )
        )
    return tuple(found)
