"""The measurements for GPUs: what is counted is right, and every part of them runs, in tiny shapes
on a CPU."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from bench.byte_tokenizer import synthetic_tokenizer
from bench.gpu import sessions
from bench.gpu.__main__ import main
from bench.gpu.anatomy import busy_time, kind_of
from bench.gpu.ceilings import Ceilings
from bench.gpu.in_process import InProcess
from bench.gpu.results import Result, Results
from bench.gpu.roofline import Length, Scheduling, step_seconds, workload_bound
from bench.gpu.sessions import Options, run_session
from bench.gpu.shapes import LLAMA_31_8B, QWEN3_06B, QWEN3_14B, ModelShape
from bench.gpu.workloads import LONGEST, Sizes, sharegpt_like, uniform
from radixrt.base.config import ServerConfig

H200_LIKE = Ceilings(read_bytes_per_s=4.3e12, gemm_flops_per_s=7.9e14)


@pytest.mark.parametrize(
    ("shape", "billions"), [(LLAMA_31_8B, 8.03), (QWEN3_06B, 0.596), (QWEN3_14B, 14.77)]
)
def test_the_shapes_have_the_published_numbers_of_parameters(
    shape: ModelShape, billions: float
) -> None:
    embeddings = shape.head_parameters * (1 if shape.tied else 2)
    assert (shape.layer_parameters + embeddings) / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_shape_counts_the_matrices_that_the_model_has(tmp_path: Path) -> None:
    from radixrt.layers.linear import LinearLayer
    from radixrt.models.loader import load_model

    shape = QWEN3_14B.tiny()
    model = load_model(shape.write_checkpoint(tmp_path), load_format="dummy", context_length=64)
    matrices = [m for m in model.model.modules() if isinstance(m, LinearLayer)]
    assert sum(m.rows * m.columns for m in matrices) == shape.layer_parameters


def test_a_decode_step_of_one_sequence_reads_the_weights() -> None:
    seconds, num_bytes, flops = step_seconds(
        LLAMA_31_8B, H200_LIKE, tokens=1, rows=1, context=0, attended=0
    )
    weights = 2 * (LLAMA_31_8B.layer_parameters + LLAMA_31_8B.head_parameters)
    assert num_bytes == weights + LLAMA_31_8B.kv_bytes_per_token
    assert flops == weights  # one multiplication and one addition for each number of two bytes
    assert seconds == num_bytes / H200_LIKE.read_bytes_per_s


def test_a_workload_on_paper_is_the_sum_of_its_steps() -> None:
    """Two prompts that fit one step, then decodes until each has its tokens: counted by hand."""
    lengths = [Length(10, 3), Length(6, 1)]
    bound = workload_bound(LLAMA_31_8B, H200_LIKE, lengths, Scheduling(max_running=8))
    steps = [
        dict(tokens=16, rows=2, context=0, attended=10 * 5 + 6 * 3),
        dict(tokens=1, rows=1, context=11, attended=11),
        dict(tokens=1, rows=1, context=12, attended=12),
    ]
    by_hand = [step_seconds(LLAMA_31_8B, H200_LIKE, **step) for step in steps]
    assert bound.steps == 3
    assert bound.seconds == pytest.approx(sum(seconds for seconds, _, _ in by_hand))
    assert bound.teraflops == pytest.approx(sum(flops for _, _, flops in by_hand) / 1e12)


def test_what_runs_at_a_time_and_what_is_computed_in_a_step_are_limited() -> None:
    lengths = [Length(100, 5)] * 8
    alone = workload_bound(LLAMA_31_8B, H200_LIKE, lengths, Scheduling(1, 50))
    together = workload_bound(LLAMA_31_8B, H200_LIKE, lengths, Scheduling(8, 800))
    assert alone.steps == 8 * (2 + 4) and together.steps == 5
    assert together.seconds < alone.seconds


def test_lengths_have_the_means_that_the_workload_names() -> None:
    lengths = sharegpt_like(Sizes(offline_prompts=20_000))
    assert sum(x.prompt for x in lengths) / len(lengths) == pytest.approx(220, rel=0.05)
    assert sum(x.output for x in lengths) / len(lengths) == pytest.approx(200, rel=0.05)
    assert all(100 <= x.prompt <= 1024 and 100 <= x.output <= 1024 for x in uniform(Sizes()))


def test_overlapping_kernels_are_busy_once_and_gaps_are_idle() -> None:
    def kernel(name: str, start: float, duration: float) -> dict:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration}

    busy = busy_time(
        [
            kernel("nvjet_tst_128x64", 0, 40),
            kernel("_draw_kernel", 30, 30),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1000},
            kernel("BatchPrefillWithPagedKVCacheKernel", 80, 20),
        ]
    )
    assert busy.span == 100 and busy.busy == 80
    assert (busy.long_gaps, busy.long_gap_share, busy.launch_gap_share) == (1, 0.2, 0)
    assert busy.by_kind == {"matrix products": 40, "sampling": 20, "attention": 20}


def test_gaps_between_launches_are_told_apart_from_waits_for_the_host() -> None:
    starts = [0.0, 12.0, 23.0, 60.0]  # after each other, but for 2, 1 and 27 µs
    busy = busy_time(
        {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": 10.0} for ts in starts
    )
    assert busy.span == 70 and busy.launch_gap_share == 3 / 70
    assert busy.long_gaps == 1 and busy.long_gap_share == pytest.approx(27 / 70)


def test_decoding_alone_may_reach_34000_tokens_a_second_on_an_h200() -> None:
    """256 sequences of 512 tokens: the bound of the case that part 6 measures first."""
    (batch, context), *_ = Sizes().anatomy
    assert (batch, context) == (256, 512)
    tokens = batch * context
    step_s, _, _ = step_seconds(
        LLAMA_31_8B, Ceilings(4.3e12, 780e12),
        tokens=batch, rows=batch, context=tokens, attended=tokens,
    )  # fmt: skip
    assert batch / step_s == pytest.approx(34_000, rel=0.02)


def test_kernels_are_told_apart_by_name() -> None:
    assert kind_of("_add_rms_norm_kernel") == kind_of("FusedAddRMSNormKernel")
    assert kind_of("void at::native::elementwise_kernel") == "other"


def test_a_table_sets_results_beside_what_was_possible(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(Result(4, "one at a time", {"ITL ms": 5.0}, {"ITL ms": 4.0}, "a note"))
    results.add(Result(4, "two at a time", {"ITL ms": 6.0}))
    results.write_report()
    table = (tmp_path / "results.md").read_text()
    assert "| one at a time | 5 | 4 | 1.25 |" in table
    assert "| two at a time | 6 |  |  |" in table and "a note" in table
    assert len(json.loads((tmp_path / "results.json").read_text())) == 2


@pytest.mark.parametrize("vocab_size", [1024, 128256])
def test_the_tokenizer_has_the_size_asked_for_and_reads_what_it_writes(vocab_size: int) -> None:
    tokenizer = synthetic_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    text = '{"name": "banana split", "scores": [100, 20]}'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    if vocab_size > 100_000:
        assert len(tokenizer.encode(" banana").ids) <= 2


def test_steps_are_measured_when_every_sequence_decodes(tmp_path: Path) -> None:
    """However small the chunks of the prompts are."""
    shape = QWEN3_06B.tiny()
    settings = {**sessions.DRY_ENGINE, "max_step_ms": 1e-3, "chunked_prefill_size": 16}
    engine = InProcess(shape.write_checkpoint(tmp_path), torch.device("cpu"), settings)
    engine.begin(shape, 6, 400, 120)
    assert engine.num_decoding() == 6
    before = engine.context()
    engine.advance(5)
    assert engine.context() - before == 6 * 5
    engine.finish()
    assert engine.num_decoding() == 0


def test_an_engine_runs_its_parts_on_a_cpu_in_tiny_shapes(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(Result(0, "made up", H200_LIKE.as_figures()))
    run_session("llama", Options(tmp_path, only=(), dry_run=True, budget_s=0, settings={}))
    assert {result.part for result in results.read()} == {0, 1, 2, 3, 4, 5}


def test_sessions_run_one_after_the_other_in_processes_of_their_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(["--dry-run", "--only", "6", "--out", str(tmp_path / "run")])
    done = capfd.readouterr()
    assert status == 0, done.out + done.err
    assert [result.part for result in Results(tmp_path / "run").read()] == [0, 6]
    table = (tmp_path / "run/results.md").read_bytes()
    assert "anatomy: done" in done.out and b"## 6." in table
    with tarfile.open(tmp_path / "run.tar.gz") as archive:
        packed = archive.extractfile("./results.md")
        assert packed is not None and packed.read() == table


@pytest.mark.parametrize("session", sessions.SESSIONS, ids=lambda session: session.name)
def test_the_engines_of_a_real_run_have_valid_settings(session: sessions.Session) -> None:
    config = ServerConfig(**{**sessions.ENGINE, **session.settings}).validate()  # type: ignore[arg-type]
    longest = Sizes().prefix + Sizes().question + Sizes().answer
    assert config.context_length is not None and config.context_length >= max(longest, 2 * LONGEST)


def test_a_budget_leaves_out_what_no_longer_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_alone(session: sessions.Session, arguments: list[str], limit_s: float) -> int:
        ran.append(session.name)
        return 0

    monkeypatch.setattr(sessions, "_run_alone", run_alone)
    options = Options(tmp_path, only=(1, 7), dry_run=True, budget_s=30, settings={})
    assert sessions.run_all(options, []) == 1
    assert ran == ["ceilings", "kernels"], (
        "30 s are less than a third of what the first engine takes"
    )
