"""``radixrt doctor --speed``."""

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from radixrt.cli.doctor import speed
from radixrt.models.memory_need import token_work
from tests.servers.engine_in_threads import engines_in_threads


def advices(*, threads: int = 8, cores: int = 8, cpus: int = 16, quota: float | None = None, pages: str = "madvise", nodes: int = 1) -> dict[str, str]:  # fmt: skip
    found = speed.machine_findings(threads, cores, cpus, quota, pages, nodes)
    return {finding.subject: finding.advice for finding in found if finding.advice}


def test_each_wasteful_setting_of_the_machine_has_its_advice() -> None:
    assert advices() == {}
    assert "--kernel-threads 8" in advices(threads=16)["threads"]
    assert "--kernel-threads 8" in advices(threads=2)["threads"]
    limited = advices(quota=2.5)["threads"]
    assert "--kernel-threads 2" in limited and "cpu.max" in limited
    assert advices(threads=2, quota=2.0) == {}
    assert "transparent_hugepage" in advices(pages="never")["huge pages"]
    assert "--tp 2 --numa" in advices(nodes=2)["NUMA"]


def test_a_low_share_has_advice_and_on_a_busy_machine_another() -> None:
    low, busy, good = (
        speed.share_finding("decode", "9 tokens/s", share, "reading", "Change it.", is_busy)
        for share, is_busy in ((0.3, False), (0.3, True), (0.8, True))
    )
    assert low.level == "warning" and low.advice == "Change it." and "30% of reading" in low.fact
    assert "other programs" in busy.advice
    assert good.level == "ok" and not good.advice


@pytest.mark.parametrize("family", ["llama", "llama_biased_tied", "qwen3_moe"])
def test_the_work_of_a_token_is_that_of_its_weights(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config, num_bytes, products = model.config, 0.0, 0.0
    for name, weights in model.named_parameters():
        share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1
        is_read = "embed_tokens" not in name or config.tie_word_embeddings
        num_bytes += 4 * share * weights.numel() * is_read
        products += share * weights.numel() * ("embed_tokens" not in name and "lm_head" not in name)
    work = token_work(folder)
    assert work.num_bytes == pytest.approx(num_bytes) and work.products == pytest.approx(products)


def test_the_doctor_runs_a_model_and_says_its_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_READ_BYTES", 1 << 22), ("_SIDE", 256), ("_PROMPT", 64), ("_ANSWER", 8)):
        monkeypatch.setattr(speed, name, value)
    with engines_in_threads():
        found = {finding.subject: finding for finding in speed.findings("demo", used=0.0)}
    assert {"load", "threads", "huge pages", "NUMA", "machine", "decode", "prefill"} == set(found)
    assert "% of the rate of reading" in found["decode"].fact
    assert "GB/s" in found["machine"].fact and "int8" in found["machine"].fact
