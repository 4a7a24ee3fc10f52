"""Bounds of a plan: the settings, and the limits of model and memory that the worker reports."""

from dataclasses import dataclass, replace

from radixrt.base.config import MIN_RUNNING_REQUESTS, ServerConfig
from radixrt.base.settings.scheduling import SchedulerSettings
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import EngineInfo
from radixrt.messages.requests import PoolingInfo


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a plan. Lengths and sizes are in tokens."""

    settings: SchedulerSettings
    max_prefill_tokens: int
    """Prompt tokens computed in one step, over all sequences."""
    context_length: int
    num_pages: int
    """Pages in the KV pool."""
    page_size: int
    eos_token_ids: tuple[int, ...] = ()
    kept_states: int = 0
    """States of recurrent layers that the worker keeps; 0: the model has no such layers, or they
    are not to be shared."""
    state_bytes: int = 0
    """Memory of one of them, over all ranks."""
    state_interval: int = 0
    """Every so many tokens of a prompt, a state is kept: whole pages."""
    num_ranks: int = 1
    """Workers, each of which loads every grammar."""
    pooling: PoolingInfo | None = None
    """How a model that gives numbers in place of text pools them."""
    adapters: tuple[AdapterInfo, ...] = ()
    """The LoRA adapters that the workers have loaded."""
    num_adapter_places: int = 0
    speculates: bool = False
    """The workers verify drafts."""
    whole_images: bool = False
    """A step computes all placeholders of an image or none."""

    @property
    def whole_prompts(self) -> bool:
        """The model is an encoder: each prompt is computed in one step, and none enters the
        tree."""
        return self.pooling is not None and self.pooling.whole_prompts

    @property
    def max_running_requests(self) -> int:
        return self.settings.max_running_requests or MIN_RUNNING_REQUESTS

    @property
    def max_step_ms(self) -> float | None:
        """That of the settings. By default there is no bound where no answer waits for its next
        token."""
        default = None if self.pooling is None else 0.0
        return default if self.settings.max_step_ms is None else self.settings.max_step_ms

    @property
    def shares_prefixes(self) -> bool:
        return not (self.settings.disable_radix_cache or self.whole_prompts)

    @property
    def longest_chunk(self) -> int:
        """Most prompt tokens of one sequence in one step."""
        return self.context_length if self.whole_prompts else self.settings.chunked_prefill_size

    @staticmethod
    def from_config(config: ServerConfig, info: EngineInfo) -> "SchedulerLimits":
        return SchedulerLimits(
            settings=replace(config, max_running_requests=info.max_running_requests),
            max_prefill_tokens=config.prefill_budget(info.device),
            context_length=info.context_length,
            num_pages=info.kv_pool_tokens // info.page_size,
            page_size=info.page_size,
            eos_token_ids=info.eos_token_ids,
            kept_states=0 if config.disable_radix_cache else info.kept_states,
            state_bytes=info.state_bytes,
            state_interval=state_interval(info),
            num_ranks=config.tp,
            pooling=info.pooling,
            adapters=info.adapters,
            num_adapter_places=config.num_adapter_places,
            whole_images=info.vision is not None and info.vision.whole_images,
            speculates=config.speculation != "off" and info.device == "cpu",
        )


def state_interval(info: EngineInfo) -> int:
    """Tokens, in whole pages, whose KV takes as much memory as a state: so the states of a long
    prompt take no more than its KV."""
    pages = -(-info.state_bytes // max(1, info.kv_bytes_per_token * info.page_size))
    return max(1, pages) * info.page_size
