"""The parts of a model runner, which are made once. The KV pool is not among them: the trial run
has one of its own."""

import dataclasses
import logging
import time
from dataclasses import dataclass

import torch

from radixrt.attention.auxiliary import AuxiliaryStates
from radixrt.attention.backend import AttentionBackend, AttentionSetup
from radixrt.attention.flashinfer import FlashInferBackend
from radixrt.attention.registry import make_backend
from radixrt.base.config import ServerConfig
from radixrt.layers.parallel import TensorParallel
from radixrt.models.decoder import CausalLM
from radixrt.models.draft_head import DraftHead
from radixrt.worker.batch import PersistentBatch
from radixrt.worker.drafts.head import BACKLOG, HeadDrafter
from radixrt.worker.drafts.head_pages import HeadPages
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
    backend_name: str
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
    head: DraftHead | None = None
    """Drafts tokens; None: no model does."""

    def auxiliary_states(self) -> AuxiliaryStates | None:
        """Keeps the states that the head reads; None: it reads none between the layers."""
        if self.head is None or not self.head.reads:
            return None
        return AuxiliaryStates(self.head.reads, self.model.config.hidden_size, self.model.dtype)

    def head_drafter(self, pool: KVPool, batch: PersistentBatch) -> HeadDrafter | None:
        """The drafter of the head, which computes on a KV pool; None: there is no head."""
        if self.head is None:
            return None
        attention = self.head.attention
        setup = dataclasses.replace(
            self.setup,
            specs=[attention.spec],
            kv_specs=[attention.kv_spec(self.setup.kv_dtype)],
            head_specs=(),
            page_size=1,
            max_pages=self.setup.max_pages * self.setup.page_size,
        )
        caches = pool.kv_caches[len(self.setup.kv_specs) :]
        backend = make_backend(self.backend_name, setup)
        pages = HeadPages(self.head, backend, caches, batch, taped=self.taped)
        # Pages on disk are written when they are full, so the head must be there by then.
        return HeadDrafter(pages, BACKLOG if self.config.cache_dir is None else 1)

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
