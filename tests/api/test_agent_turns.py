"""Ten turns of an agent in each API: each prompt begins with the tokens of the turn before, also
where the template would write them in another way."""

import itertools
import re
from collections.abc import Iterator

import pytest

from radixrt.messages.ids import unpack_ids
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.agent_turns import AGENTS
from tests.api.conftest import RunningServer, StartServer
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.servers.fake_scheduler import engine_info

FORGETFUL = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.strip() }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As many models' templates: it drops the reasoning of earlier turns, opens that of the next one,
and writes calls of tools in its own way."""

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'
WRITTEN = f"The list is long.\n</think>\n\nI look.\n{CALL}"
NUM_TURNS = 10


@pytest.fixture(scope="module")
def forgetful(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = save_byte_level(tmp_path_factory.mktemp("forgetful"), FORGETFUL)
    yield start_server(
        engine_info(context_length=16384, kv_pool_tokens=32768),
        folder,
        reasoning_parser="deepseek-r1",
    )


@pytest.mark.parametrize("name", AGENTS)
def test_each_turn_repeats_the_tokens_of_the_turn_before(
    forgetful: RunningServer, name: str
) -> None:
    spelled = _spelled(forgetful.vocabulary, WRITTEN)
    scheduler = forgetful.scheduler
    scheduler.script = lambda request: [*spelled, 1]
    scheduler.requests.clear()
    extra = {"replay_reasoning": True} if name in ("chat", "ollama") else {}
    turns = [*itertools.islice(AGENTS[name](forgetful.url, "tiny", extra), NUM_TURNS)]
    prompts = [unpack_ids(request.token_ids).tolist() for request in scheduler.requests]
    assert [turn.prompt for turn in turns] == [len(prompt) for prompt in prompts]
    assert all(turn.counted in (None, turn.prompt) for turn in turns)
    assert all(turn.output == len(spelled) + 1 for turn in turns)
    for before, prompt in itertools.pairwise(prompts):
        known = [*before, *spelled]
        assert prompt[: len(known)] == known
    text = forgetful.vocabulary.decode(prompts[-1])
    assert text.count(WRITTEN + "<|im_end|>\n<|im_start|>tool") == NUM_TURNS - 1


def test_without_replay_the_template_decides(forgetful: RunningServer) -> None:
    forgetful.answer_with(WRITTEN)
    forgetful.scheduler.requests.clear()
    for name in ("chat", "messages"):
        [*itertools.islice(AGENTS[name](forgetful.url, "tiny", {"replay_reasoning": False}), 2)]
        ids = unpack_ids(forgetful.scheduler.requests[-1].token_ids).tolist()
        assert "The list is long." not in forgetful.vocabulary.decode(ids)


def _spelled(vocabulary: Vocabulary, text: str) -> list[int]:
    """A text in as many tokens as it has characters, but for its tags."""
    pieces = re.findall("</?[a-z_]+>|.", text, re.DOTALL)
    return [i for piece in pieces for i in vocabulary.encode(piece, add_special_tokens=False)]
