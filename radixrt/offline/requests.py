"""Makes the requests of a Python program: their ids, options and parameters."""

import itertools
import os

from msgspec.structs import replace

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.client.engine_client import EngineClient
from radixrt.constrained.constraint import Constraint
from radixrt.constrained.requests import check_sampling
from radixrt.kv.cache_hint import CacheHint, hints_of, prepares_next_turn, shares_answers
from radixrt.messages.answers import EngineInfo
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.requests import ChatPrompt, GenerateRequest, Prompt, RequestOptions

DEFAULT_MAX_TOKENS = 256
"""Most tokens of the answer to a text, without parameters. Models seldom end a text by themselves,
and would go on to the end of the context."""


class RequestMaker:
    """The requests of one program to one engine."""

    def __init__(self, config: ServerConfig, client: EngineClient, info: EngineInfo) -> None:
        self._config = config
        self._client = client
        self._info = info
        self._ids = itertools.count()

    def new_id(self) -> str:
        return f"llm-{os.getpid()}-{next(self._ids)}"

    def options(
        self, cache_salt: str, cache: CacheHint | None, adapter: str = ""
    ) -> RequestOptions:
        """Raises RequestError if the cache hint is invalid, or there is no such adapter."""
        config, options = self._config, hinted_options(cache_salt, cache)
        shares = shares_answers(cache, config.disable_shared_answers)
        prepares = prepares_next_turn(cache, config.prepare_next_turns, config.idle_share)
        options = replace(options, shares_answers=shares, prepares_next_turn=prepares)
        if not adapter:
            return options
        found = self._client.adapters.get(adapter)
        if found is None:
            names = ", ".join(self._client.adapters) or "none"
            raise RequestError(f"There is no adapter {adapter}; loaded: {names}.", status=404)
        root = options.root._replace(adapter=found.digest)
        return replace(options, root=root, adapter_name=adapter)

    def default_sampling(self, prompt: object, constraint: object) -> SamplingParams:
        """The checkpoint's parameters; those of a text without a constraint have an end."""
        params = SamplingParams(**self._info.default_sampling)
        if isinstance(prompt, ChatPrompt) or constraint or params.max_tokens is not None:
            return params
        return replace(params, max_tokens=DEFAULT_MAX_TOKENS)

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        options: RequestOptions,
        constraint: Constraint | None,
        *,
        stream: bool = False,
    ) -> GenerateRequest:
        """Raises RequestError if a parameter is invalid, or does not fit the constraint."""
        check_sampling(constraint, sampling)
        reasons = isinstance(prompt, ChatPrompt) and self._config.reasoning_parser != "none"
        return GenerateRequest(
            request_id=self.new_id(),
            prompt=prompt,
            options=replace(options, sampling=sampling.validate(self._info.vocab_size)),
            stream=stream,
            constraint=constraint,
            parse_reasoning=self._config.reasoning_parser if reasons else "",
        )


def hinted_options(cache_salt: str, cache: CacheHint | None) -> RequestOptions:
    """Raises RequestError if the cache hint is invalid."""
    hints = hints_of(cache)
    hints = replace(hints, explain_texts=hints.explain)
    return RequestOptions(root=CacheRoot(salt=cache_salt), cache_hints=hints)
