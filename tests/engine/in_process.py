"""The real scheduler and the real worker in one process, without sockets between them."""

import contextlib
import queue
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import PREFILL_ONLY, SamplingParams
from radixrt.constrained.grammar import Grammar
from radixrt.device.device import CPU, Device
from radixrt.layers.parallel import TensorParallel
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import AnswerReport
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.calls import LoadAdapterCall
from radixrt.messages.grammars import GrammarUse, LoadGrammar
from radixrt.messages.ids import pack_ids
from radixrt.messages.links import PageMove
from radixrt.messages.moves import PagesRead, PagesWritten, ReadPages, SavePages
from radixrt.messages.requests import DEFAULT_POOLING, PoolingRequest, RequestOptions
from radixrt.messages.sequences import PositionLogprobs, SequenceOutput, SequenceRequest, TokenBatch
from radixrt.messages.steps import StepPlan
from radixrt.models.checkpoint import read_config
from radixrt.models.registry import check_architecture, is_encoder
from radixrt.scheduler.disk.pages import open_pages
from radixrt.scheduler.invariants import check_invariants
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.scheduler import Scheduler
from radixrt.tokenizer.prompt.prompts import EncodedPrompt
from radixrt.worker.build import build_encoder, build_runner
from radixrt.worker.kv.page_mover import PageMover

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


class InProcessEngine:
    """Two steps in flight, as in a server. The invariants are checked after every fourth step, and
    after the last; the tests of the scheduler check them after each.

    Args:
        device: that computes.
        settings: of the server.
    """

    def __init__(self, model_dir: Path, *, device: Device = CPU, **settings: object) -> None:
        torch.set_num_threads(1)
        defaults = {
            "max_total_tokens": 4096,
            "max_running_requests": 16,
            "log_level": "warning",
            "speculation": "off",
        }
        self.loaded: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """What the worker has loaded: grammars and adapters."""
        config = ServerConfig(model_path=str(model_dir), **{**defaults, **settings})  # type: ignore[arg-type]
        self.runner: Any
        if is_encoder(check_architecture(read_config(model_dir))):
            self.runner, self.info = build_encoder(config, device)
        else:
            self.runner, self.info = build_runner(
                config,
                device,
                TensorParallel(),
                model_dir / "tokenizer.json",
                self.loaded.put,
            )
        limits = SchedulerLimits.from_config(config, self.info)
        self.disk = open_pages(config, self.info, 0)
        self.scheduler = Scheduler(limits, disk=self.disk)
        self._moved: queue.SimpleQueue[PagesWritten | PagesRead] = queue.SimpleQueue()
        self._moves_under_way = 0
        if self.disk is not None:
            self._mover = PageMover(
                self.runner.kv_caches, self._moved.put, states=self.runner.kept_states
            )
        self.cached: list[int] = []
        """Cached tokens of each prompt of the last call."""
        self.logprobs: list[list[PositionLogprobs]] = []
        self.prompt_logprobs: list[list[PositionLogprobs]] = []
        self.vectors: dict[int, bytes] = {}
        """By sequence id."""
        self.reports: list[AnswerReport] = []
        """The last ones of the answers of the last call."""
        self._next_id = self._num_steps = 0
        self._sent: deque[StepPlan | PageMove] = deque()

    def generate(
        self,
        prompts: Sequence[list[int] | EncodedPrompt],
        sampling: SamplingParams | list[SamplingParams] = GREEDY,
        salt: str | list[str] = "",
        grammars: list[GrammarUse | None] | None = None,
        *,
        speculation: bool = True,
        adapters: str | list[str] = "",
    ) -> list[list[int]]:
        """Answer prompts that arrive together. Settings, salts and names of adapters are those of
        all prompts, or one a prompt."""
        return self._run(self._requests(prompts, sampling, salt, grammars, speculation, adapters))

    def pool(
        self,
        prompts: Sequence[list[int] | EncodedPrompt],
        pool: PoolingRequest = DEFAULT_POOLING,
        second_segment_start: int = 0,
    ) -> list[NDArray[np.float32]]:
        """The numbers of prompts that arrive together."""
        requests = self.pool_requests(prompts, pool, second_segment_start)
        assert self._run(requests) == [[]] * len(prompts), "nothing is generated"
        return [np.frombuffer(self.vectors[r.seq_id], dtype=np.float32) for r in requests]

    def pool_requests(
        self,
        prompts: Sequence[list[int] | EncodedPrompt],
        pool: PoolingRequest = DEFAULT_POOLING,
        second_segment_start: int = 0,
    ) -> list[SequenceRequest]:
        options = RequestOptions(sampling=PREFILL_ONLY, pool=pool)
        requests = [
            SequenceRequest(
                seq_id=self._next_id + index,
                **self._prompt_fields(prompt),
                options=options,
                second_segment_start=second_segment_start,
            )
            for index, prompt in enumerate(prompts)
        ]
        self._next_id += len(requests)
        return requests

    def _prompt_fields(self, prompt: list[int] | EncodedPrompt) -> dict[str, Any]:
        """The fields of a prompt; its images are loaded."""
        if not isinstance(prompt, EncodedPrompt):
            return {"token_ids": pack_ids(prompt)}
        for image in prompt.pictures:
            self.scheduler.images.load(image.load_order())
        return {
            "token_ids": pack_ids(prompt.token_ids),
            "key_ids": prompt.key_ids,
            "images": list(prompt.images),
        }

    def use(
        self,
        grammar: Grammar,
        begin_after: list[int] | None = None,
        excluded: Sequence[list[int]] = (),
        opening: Sequence[int] = (),
        then_after: list[int] | None = None,
    ) -> GrammarUse:
        """Have a grammar loaded that answers are to be held to."""
        self.scheduler.grammars.load(LoadGrammar(grammar))
        paths = [pack_ids(path) for path in excluded]
        return GrammarUse(
            grammar.key,
            pack_ids(begin_after or []),
            paths,
            opening=pack_ids(opening),
            then_after=pack_ids(then_after or []),
        )

    def begin(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams = GREEDY,
        adapters: str | list[str] = "",
    ) -> list[int]:
        """Let prompts arrive together; :meth:`advance` works on them. Returns their sequence
        ids."""
        requests = self._requests(prompts, sampling, adapters=adapters)
        for request in requests:
            assert self.scheduler.add(request) is None
        return [request.seq_id for request in requests]

    def load_adapter(self, name: str, folder: Path) -> AdapterInfo | RequestError:
        """Load an adapter between two steps, in place of another of the name."""
        found: list[AdapterInfo | RequestError] = []
        call = LoadAdapterCall(name=name, path=str(folder), replaces=True)
        self.scheduler.adapters.load(call, found.append)
        self._order_adapters()
        self.scheduler.adapters.read(self.loaded.get())
        self._order_adapters()
        return found[0]

    @property
    def _digests(self) -> dict[str, str]:
        return {info.name: info.digest for info in self.scheduler.adapters.infos} | {"": ""}

    def _order_adapters(self) -> None:
        for order in self.scheduler.adapters.take_orders():
            self.runner.order(order)

    def _requests(
        self,
        prompts: Sequence[list[int] | EncodedPrompt],
        sampling: SamplingParams | list[SamplingParams],
        salt: str | list[str] = "",
        grammars: list[GrammarUse | None] | None = None,
        speculation: bool = True,
        adapters: str | list[str] = "",
    ) -> list[SequenceRequest]:
        digests = self._digests
        names = [adapters] * len(prompts) if isinstance(adapters, str) else adapters
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        salts = [salt] * len(prompts) if isinstance(salt, str) else salt
        requests = [
            SequenceRequest(
                seq_id=self._next_id + index,
                **self._prompt_fields(prompt),
                grammar=grammar,
                options=RequestOptions(
                    sampling=params,
                    root=CacheRoot(salt=own_salt, adapter=digests[name]),
                    speculation=speculation,
                ),
            )
            for index, (prompt, params, own_salt, grammar, name) in enumerate(
                zip(prompts, each, salts, grammars or [None] * len(prompts), names, strict=True)
            )
        ]
        self._next_id += len(requests)
        return requests

    def generate_from(
        self,
        prompt: list[int] | EncodedPrompt,
        begun: list[int],
        sampling: SamplingParams,
        grammar: GrammarUse | None = None,
        adapter: str = "",
    ) -> list[int]:
        """Go on with an answer; returns what is new."""
        ids = prompt.token_ids if isinstance(prompt, EncodedPrompt) else prompt
        request = SequenceRequest(
            seq_id=self._next_id,
            **{**self._prompt_fields(prompt), "token_ids": pack_ids(ids + begun)},
            num_output=len(begun),
            grammar=grammar,
            options=RequestOptions(
                sampling=sampling, root=CacheRoot(adapter=self._digests[adapter])
            ),
        )
        self._next_id += 1
        return self._run([request])[0]

    def _run(self, requests: list[SequenceRequest]) -> list[list[int]]:
        outputs = {request.seq_id: SequenceOutput() for request in requests}
        for request in requests:
            assert self.scheduler.add(request) is None
        self._load_images()
        while True:
            self._load_grammars()
            batches = self.advance()
            for batch in batches:
                for seq_id, output in batch.outputs.items():
                    outputs[seq_id].extend(output)
            is_moving = self._moves_under_way or len(self.scheduler.state.waiting)
            if not batches and not self.scheduler.num_in_flight and not is_moving:
                break
        assert not self.scheduler.grammars.num_waiting
        assert not self.scheduler.state.counters.replayed_tokens, "every answer is computed"
        every = outputs.values()
        self.reports = [output.finished for output in every if output.finished is not None]
        self.cached = [output.started.cached_tokens for output in every if output.started]
        self.logprobs = [output.logprobs for output in every]
        self.prompt_logprobs = [output.prompt_logprobs for output in every]
        self.vectors |= {
            seq_id: output.vector for seq_id, output in outputs.items() if output.vector
        }
        return [output.token_ids for output in every]

    def advance(self) -> list[TokenBatch]:
        """Fill the pipeline, and let the worker take its next step, or bring back the last where
        nothing follows."""
        while self.scheduler.num_in_flight < 2:
            plan = self.scheduler.plan()
            self._sent += self.scheduler.take_moves()
            if plan is None:
                break
            self._sent.append(plan)
        self._move()
        results = self.runner.step(self._sent.popleft()) if self._sent else self.runner.collect()
        batches = []
        for result in results:
            # Unknown times: drafts would depend on the load of the machine.
            untimed = msgspec.structs.replace(result, step_s=0.0)
            batches.append(self.scheduler.absorb(untimed))
            self._num_steps += 1
            if self._num_steps % 4 == 0 or not self.scheduler.num_in_flight:
                check_invariants(self.scheduler)
        return batches

    def _move(self) -> None:
        """Give the worker the orders before its next step, and the scheduler the answers. If there
        is no step, wait for one."""
        while self._sent and not isinstance(self._sent[0], StepPlan):
            order = self._sent.popleft()
            self._mover.take(order)
            self._moves_under_way += isinstance(order, SavePages | ReadPages)
        with contextlib.suppress(queue.Empty):
            while self._moves_under_way:
                self.scheduler.moved(self._moved.get(block=not self._sent))
                self._moves_under_way -= 1

    def _load_images(self) -> None:
        for order in self.scheduler.images.take_orders():
            self.runner.order(order)
        while self.runner.images is not None and self.runner.images.has_work:
            for loaded in self.runner.images.work(0.0):
                assert self.scheduler.loaded(loaded) == []

    def _load_grammars(self) -> None:
        for order in self.scheduler.grammars.take_orders():
            self.runner.matchers.loader.order(order)
            if isinstance(order, LoadGrammar):
                assert self.scheduler.loaded(self.loaded.get()) == []
