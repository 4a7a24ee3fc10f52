"""Makes the receipts of answers: this process knows the prompt's tokens, the settings as they were
filled in, and the tokens that the client gets."""

import hashlib
import importlib.metadata
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.answers import EngineInfo
from radixrt.messages.receipts import COMPUTING, Parameters, Receipt
from radixrt.messages.requests import GenerateRequest
from radixrt.tokenizer.prompt.prompts import EncodedPrompt
from radixrt.tokenizer.vocabulary import Vocabulary


class ReceiptMaker:
    """Makes the receipts of one engine."""

    def __init__(self, config: ServerConfig, info: EngineInfo, vocabulary: Vocabulary) -> None:
        names = (*COMPUTING, "random_seed") if config.load_format == "dummy" else COMPUTING
        settings = {name: getattr(config, name) for name in names}
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._engine: dict[str, str] | None = None
        if config.receipts:
            digest = hashlib.sha256(vocabulary.backend.to_str().encode()).hexdigest()
            grammars = importlib.metadata.version("llguidance")
            computing = {name: part for name, part in info.kv_parts.items() if name != "head"}
            self._engine = {**computing, "tokenizer": digest, "grammars": grammars}

    def of(
        self, request: GenerateRequest, prompt: EncodedPrompt, sampling: SamplingParams
    ) -> Callable[[list[int]], Receipt] | None:
        """Makes the receipt of an answer from its tokens; None: it is not asked for.

        Args:
            sampling: of this answer, as the scheduler gets it.
        """
        if not request.receipt or self._engine is None:
            return None
        if sampling.is_greedy:  # a seed that was drawn has no effect
            sampling = replace(sampling, seed=None)
        parameters = Parameters(
            sampling=sampling,
            constraint=request.constraint,
            parse_reasoning=request.parse_reasoning,
            parse_tool_calls=request.parse_tool_calls,
        )
        images = [one.key.hex() for one in prompt.pictures]
        return partial(
            Receipt.make,
            self._engine,
            self._settings,
            prompt.token_ids,
            parameters,
            images=images,
        )

    def check(self, request: GenerateRequest) -> None:
        """
        Raises:
            RequestError: the request asks for a receipt that cannot be given.
        """
        if not request.receipt:
            return
        reason = ""
        if self._engine is None:
            reason = "the server gives receipts with --receipts"
        elif request.options.root.adapter:
            reason = "answers of an adapter have none"
        if reason:
            raise RequestError(f"receipt: {reason}; leave it out.", param="receipt")
