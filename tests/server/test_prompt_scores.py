"""Log-probabilities of the end of a prompt: those of the whole, without computing what comes before
again."""

import httpx
import pytest

from tests.servers import Server

PROMPT = [7 + number % 50 for number in range(64)]


def score(server: Server, prompts: list[list[int]], start: int) -> list[dict]:
    body = {
        "input_ids": prompts,
        "return_logprob": True,
        "logprob_start_len": start,
        "sampling_params": {"max_new_tokens": 0},
    }
    response = httpx.post(f"{server.url}/generate", json=body, timeout=30)
    assert response.status_code == 200, response.text
    return [result["meta_info"] for result in response.json()]


@pytest.mark.parametrize("start", [1, 2, 17, 60, 63, 64])
def test_the_end_of_a_prompt_scores_as_it_does_in_the_whole(server: Server, start: int) -> None:
    (whole,) = score(server, [PROMPT], 0)
    (end,) = score(server, [PROMPT], start)
    scores = whole["input_token_logprobs"][start:]
    assert [entry[1] for entry in end["input_token_logprobs"]] == PROMPT[start:]
    assert [entry[0] for entry in end["input_token_logprobs"]] == pytest.approx(
        [entry[0] for entry in scores], abs=1e-4
    )


def test_several_ends_of_one_prompt_compute_it_once(server: Server) -> None:
    httpx.post(f"{server.url}/flush_cache")
    ends = [[*PROMPT, token, token] for token in (5, 6, 8, 9)]
    scored = score(server, ends, len(PROMPT))
    computed = sum(meta["prompt_tokens"] - meta["cached_tokens"] for meta in scored)
    assert computed <= len(PROMPT) + len(ends) * (2 + 4)  # the rest of a page, at worst
    server.info(check_invariants=True)
