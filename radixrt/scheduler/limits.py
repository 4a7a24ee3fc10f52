"""Bounds of a plan: the settings, and the limits of model and memory that the worker reports."""

from dataclasses import dataclass

from radixrt.base.config import SchedulerSettings, ServerConfig
from radixrt.messages.answers import EngineInfo


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a plan. Lengths and sizes are in tokens."""

    settings: SchedulerSettings
    max_prefill_tokens: int
    """Prompt tokens computed in one step, over all sequences."""
    context_length: int
    num_pages: int
    """Of the KV pool."""
    page_size: int
    eos_token_ids: tuple[int, ...] = ()
    num_ranks: int = 1
    """Workers, each of which loads every grammar."""
    speculates: bool = False
    """The workers verify drafts."""

    @staticmethod
    def of(config: ServerConfig, info: EngineInfo) -> "SchedulerLimits":
        return SchedulerLimits(
            settings=config,
            max_prefill_tokens=config.prefill_budget(info.device),
            context_length=info.context_length,
            num_pages=info.kv_pool_tokens // info.page_size,
            page_size=info.page_size,
            eos_token_ids=info.eos_token_ids,
            num_ranks=config.tp,
            speculates=config.speculation == "auto" and info.device == "cpu",
        )
