"""The parts of a model runner, which are made once. The KV pool is not among them: the trial run
has one of its own."""

import logging
import time
from dataclasses import dataclass

import torch

from radixrt.attention.backend import AttentionBackend, AttentionSetup
from radixrt.attention.flashinfer import FlashInferBackend
from radixrt.base.config import ServerConfig
from radixrt.layers.parallel import TensorParallel
from radixrt.models.decoder import CausalLM
from radixrt.worker.kv.pool import KVPool
from radixrt.worker.pooling import Pooler
from radixrt.worker.replays import LARGEST, DecodeGraphs, ladder
from radixrt.worker.sampling.grammar_loader import GrammarLoader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """All but the KV pool."""

    config: ServerConfig
    model: CausalLM
    setup: AttentionSetup
    backend: AttentionBackend
    eos_token_ids: tuple[int, ...]
    """The end tokens that the model can produce."""
    loader: GrammarLoader
    taped: bool
    """All that computes can be repeated from a tape."""
    tp: TensorParallel
    pooler: Pooler | None = None
    """The pooler of a checkpoint that gives numbers in place of text."""
    expert_counts: torch.Tensor | None = None
    """Tokens of each expert, int64 [layers, experts]; None: they are not counted."""

    @property
    def _capturable(self) -> FlashInferBackend | None:
        """The backend, if its decode steps are to be captured."""
        if self.config.debug_disable_cuda_graph or not self.setup.device.has_graphs:
            return None
        return self.backend if isinstance(self.backend, FlashInferBackend) else None

    def reserve_for_graphs(self) -> None:
        """Allocate the buffers that captured steps read, before the KV pool takes the memory."""
        if (backend := self._capturable) is not None:
            backend.reserve_for_graphs()

    def decode_graphs(self, pool: KVPool) -> DecodeGraphs | None:
        """Capture decode steps on a KV pool; None where the settings, the device or the backend
        have none."""
        if (backend := self._capturable) is None:
            return None
        largest = min(self.config.cuda_graph_max_batch_size or LARGEST, self.setup.max_rows)
        graphs = DecodeGraphs(self.model, backend, pool, ladder(largest), self.setup.device)
        begin = time.perf_counter()
        graphs.capture()
        log.info("Captured decode steps in %.1f s.", time.perf_counter() - begin)
        return graphs
