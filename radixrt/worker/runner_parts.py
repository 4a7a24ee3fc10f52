"""What is a model runner put together from? All of it is made once, but for the KV pool: the trial run has one of its own."""

import logging
import time
from dataclasses import dataclass

from radixrt.attention.backend import AttentionBackend, CapturableBackend
from radixrt.attention.setup import AttentionSetup
from radixrt.base.config import ServerConfig
from radixrt.models.decoder import CausalLM
from radixrt.worker.batch import PersistentBatch
from radixrt.worker.decode_graphs import DecodeGraphs, ladder
from radixrt.worker.kv.pool import KVPool
from radixrt.worker.runner import ModelRunner
from radixrt.worker.sampling.grammars import GrammarShop, GrammarState
from radixrt.worker.sampling.state import SamplingState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """All but the KV pool."""

    config: ServerConfig
    model: CausalLM
    setup: AttentionSetup
    backend: AttentionBackend
    eos_token_ids: tuple[int, ...]
    """Those that the model can produce."""
    shop: GrammarShop
    taped: bool
    """All that computes can be repeated from a tape."""

    def runner(self, pool: KVPool, graphs: DecodeGraphs | None = None) -> ModelRunner:
        """A runner on a KV pool. ``graphs`` are of the same pool."""
        device, vocab_size = self.setup.device, self.model.vocab_size
        batch = PersistentBatch(
            self.config.max_running_requests,
            self.setup.max_pages,
            self.config.page_size,
            device,
            spare_page=pool.spare_page,
            graph_rows=None if graphs is None else graphs.rows_for,
        )
        sampling = SamplingState(
            self.config.max_running_requests,
            vocab_size,
            eos_token_ids=self.eos_token_ids,
            device=device,
        )
        grammars = GrammarState(
            self.shop,
            vocab_size,
            eos_token_ids=self.eos_token_ids,
            jump_forward=not self.config.debug_disable_jump_forward,
        )
        return ModelRunner(
            self.model,
            self.backend,
            pool,
            batch,
            sampling,
            grammars,
            device,
            graphs,
            taped=self.taped,
        )

    def decode_graphs(self, pool: KVPool) -> DecodeGraphs | None:
        """Capture decode steps on a KV pool; None where the settings, the device or the backend have none."""
        config, device = self.config, self.setup.device
        if config.debug_disable_cuda_graph or not device.has_graphs:
            return None
        if not isinstance(self.backend, CapturableBackend):
            return None
        largest = min(config.cuda_graph_max_batch_size, config.max_running_requests)
        graphs = DecodeGraphs(self.model, self.backend, pool, ladder(largest), device)
        begin = time.perf_counter()
        graphs.capture()
        log.info("Captured decode steps in %.1f s.", time.perf_counter() - begin)
        return graphs
