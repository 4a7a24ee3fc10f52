"""Checkpoints in every form that is served, and a clear refusal of every other."""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.device.device import make_device
from radixrt.device.first_calls import FUNCTIONS, call_functions_once
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.parallel import TensorParallel
from radixrt.models.checkpoint import (
    MAX_JSON_BYTES,
    check_checkpoint,
    check_ranks,
    context_length,
    generation_config,
    resolve_model_path,
)
from radixrt.models.loader import load_model
from radixrt.models.refusals import check_rope
from radixrt.models.registry import ARCHITECTURES, check_architecture, model_class
from radixrt.supervisor.launch import prepare
from radixrt.worker.build import _load as load_for_worker
from tests.checkpoints import CONFIGS, HYBRIDS, VOCAB_SIZE
from tests.models.harness import Harness

torch.set_num_threads(1)
PROMPT = list(range(3, 33))


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that the test may spoil."""

    def get(architecture: str) -> Path:
        return Path(shutil.copytree(checkpoint(architecture), tmp_path / architecture))

    return get


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return Harness(load_model(folder, **options), page_size=16).logits(PROMPT)


# Forms that are served


def test_shards_load_like_a_single_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_checkpoint(tmp_path)
    assert torch.equal(logits(tmp_path), logits(checkpoint("llama")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma2", "gemma3", "gemma4_e"])
def test_half_precision_checkpoints_agree_with_transformers(
    checkpoint: Callable[[str], Path], tmp_path: Path, architecture: str, dtype: str
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(architecture), dtype=dtype, attn_implementation="eager"
    )
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert ours.dtype is getattr(torch, dtype)
    exact = load_model(checkpoint(architecture))
    ratios = []
    for step in (
        1,
        5,
        7,
    ):  # one expert chosen otherwise, by a rounding, changes all logits of a prompt
        prompt = list(range(3, 3 + 30 * step, step))
        computed = Harness(ours, page_size=16).logits(prompt)
        assert computed.dtype is torch.float32
        expected = Harness(exact, page_size=16).logits(prompt)
        with torch.inference_mode():
            rounded = theirs(torch.tensor([prompt])).logits[0].float()
        ratios.append(float((computed - expected).abs().mean() / (rounded - expected).abs().mean()))
    # both are roundings of the float32 result, and ours is not the worse one
    assert statistics.median(ratios) <= 1.2, ratios


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_can_be_chosen(checkpoint: Callable[[str], Path], dtype: str) -> None:
    model = load_model(checkpoint("qwen3"), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_fused_experts_load_like_single_ones(copy: Callable[[str], Path]) -> None:
    folder = copy("mixtral")
    expected = logits(folder)

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            old, new = (
                f"model.layers.{layer}.{block}.experts" for block in ("block_sparse_moe", "mlp")
            )
            w1, w2, w3 = (
                torch.stack([tensors.pop(f"{old}.{e}.{w}.weight") for e in range(4)])
                for w in ("w1", "w2", "w3")
            )
            tensors[f"{new}.gate_up_proj"] = torch.cat([w1, w3], dim=1)
            tensors[f"{new}.down_proj"] = w2

    edit_weights(folder, fuse)
    assert torch.equal(logits(folder), expected)


def test_stored_rotary_tables_and_a_tied_head_are_passed_over(copy: Callable[[str], Path]) -> None:
    folder = copy("llama_biased_tied")
    expected = logits(folder)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12),
        "lm_head.weight": torch.ones(VOCAB_SIZE, 64),
    }
    edit_weights(folder, lambda tensors: tensors.update(extra))
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3_long", "qwen2_yarn"])
def test_configs_of_transformers_4_mean_the_same(
    copy: Callable[[str], Path], architecture: str
) -> None:
    """Version 4 wrote rope_theta, rope_scaling and torch_dtype; most checkpoints on the hub have
    them."""
    folder = copy(architecture)
    expected = logits(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        del config["layer_types"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    rope.pop("partial_rotary_factor", None)
    config["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(folder), expected)


def test_dummy_weights_need_no_weight_files_and_follow_the_seed(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("gemma2")
    (folder / "model.safetensors").unlink()
    check_checkpoint(folder, "dummy")
    first, again, other = (logits(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert first.isfinite().all() and first.std() > 0.01
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_states_its_attention(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    model = load_model(checkpoint(architecture))
    specs = model.attention_specs()
    count = len(model.model.layers)
    assert len(model.kv_specs(model.dtype)) == len(model.state_specs()) == count
    assert any(spec.tensors for spec in model.state_specs()) == (architecture in HYBRIDS)
    assert len(specs) == count or architecture in HYBRIDS
    windows = [spec.sliding_window for spec in specs]
    expected = {"gemma2": [8, None, 8, None], "gemma3": [8, 8, None, 8], "qwen2": [None, 7, 7]}
    expected |= {"gemma4": [8, None, 8, None], "gemma4_e": [8, 8, None, 8, 8, None]}
    expected["olmo3"] = expected["exaone4"] = [9, None, 9]
    assert windows == expected.get(architecture, windows)


def test_layers_that_predict_further_tokens_are_left_out(copy: Callable[[str], Path]) -> None:
    folder = copy("glm4_moe")
    expected = logits(folder)
    edit_weights(
        folder, lambda tensors: tensors.update({"model.layers.3.enorm.weight": torch.ones(64)})
    )
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("architecture", ["ministral3", "mistral"])
def test_the_language_model_of_mistral3_is_served(
    copy: Callable[[str], Path], architecture: str
) -> None:
    """Of checkpoints that also see images; the text model is Ministral 3's or Mistral's."""
    folder = copy(architecture)
    expected = logits(folder)

    def add_vision(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.ln_pre.weight"] = torch.ones(64)
        tensors["multi_modal_projector.norm.weight"] = torch.ones(64)

    edit_weights(folder, add_vision)
    text_config = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": text_config,
        "vision_config": {"model_type": "pixtral"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(folder), expected)


def test_longrope_follows_the_served_context_length(checkpoint: Callable[[str], Path]) -> None:
    """Within the original context (16), short prompts are rotated as transformers rotates them."""
    folder, prompt = checkpoint("phi3_long"), PROMPT[:12]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    short = Harness(load_model(folder, context_length=16), page_size=4).logits(prompt)
    torch.testing.assert_close(short, expected, atol=1e-4, rtol=0)
    long = Harness(load_model(folder), page_size=4).logits(prompt)
    assert (long - expected).abs().max() > 1e-2


# Refusals


def test_an_unsupported_architecture_is_refused_with_the_nearest_supported_one() -> None:
    with pytest.raises(ConfigError, match=r"Not yet: T5Model .*nearest supported model is Qwen/"):
        check_architecture({"architectures": ["T5Model"]})
    with pytest.raises(ConfigError, match=r"Not yet: .* of its family: Gemma2ForCausalLM\.$"):
        check_architecture({"architectures": ["Gemma2ForSequenceClassification"]})
    with pytest.raises(ConfigError, match="names no architecture"):
        check_architecture({})


def test_every_registered_architecture_has_its_class() -> None:
    for name in ARCHITECTURES:
        found = model_class(name)
        if name.endswith(("ForCausalLM", "ForConditionalGeneration")):
            family = name.partition("For")[0]
            family = {"Gemma4Unified": "Gemma4", "Qwen3_5Moe": "Qwen3_5"}.get(family, family)
            assert found.__name__.partition("For")[0] == family
        else:  # one class for vectors and classes, and perhaps for text
            family = name.partition("For")[0].removesuffix("Model").removeprefix("XLM")
            assert found.__name__.startswith(family) and callable(found.classify)


def refuse(folder: Path, match: str) -> None:
    """Both the early check and the loader refuse."""
    with pytest.raises(ConfigError, match=match):
        check_checkpoint(folder)
    with pytest.raises(ConfigError, match=match):
        load_model(folder)


def test_missing_folder_and_missing_or_broken_config(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "config.json").write_text("{")
    refuse(folder, "cannot be read as JSON")
    (folder / "config.json").write_text("[]")
    refuse(folder, "no JSON object")
    (folder / "config.json").unlink()
    refuse(folder, "holds no config.json")
    refuse(folder / "nowhere", "does not exist")


@pytest.mark.parametrize("value", [0, -1, "x", 3.5, []])
@pytest.mark.parametrize("name", ["num_key_value_heads", "vocab_size", "head_dim"])
def test_an_impossible_size_is_refused(copy: Callable[[str], Path], name: str, value: Any) -> None:
    folder = copy("llama")
    edit_config(folder, **{name: value})
    refuse(folder, f"'{name}'")


@pytest.mark.parametrize(
    "absurd",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 2**31},
        {"head_dim": 2**20},
        {"num_local_experts": 2**40},
        {"num_experts": 2**20},
        {"max_position_embeddings": 10**12},
    ],
)
def test_a_size_that_no_tensor_has_is_refused_before_anything_is_allocated(
    copy: Callable[[str], Path], absurd: dict[str, int]
) -> None:
    folder = copy("llama")
    edit_config(folder, **absurd)
    refuse(folder, rf"{next(iter(absurd))!r}: .* at most \d+ is possible")


def test_an_absurd_stretch_or_number_of_end_tokens_is_refused(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("llama")
    edit_config(folder, rope_parameters={"rope_type": "yarn", "factor": 1e300})
    refuse(folder, "stretches its context to .* at most")
    folder = copy("qwen2")
    edit_config(folder, eos_token_id=list(range(100_000)))
    with pytest.raises(ConfigError, match=r"names 100000 end tokens .* at most 256"):
        generation_config(folder)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "nonsense"}, "rope type 'nonsense'"),
        ({"rope_type": "linear", "factor": 0}, "'factor': 0"),
        ({"rope_type": "linear", "factor": "8"}, "'factor': 8"),
        ({"rope_type": "dynamic", "factor": float("nan")}, "'factor': nan"),
        ({"rope_type": "default", "rope_theta": 0}, "'rope_theta': 0"),
        ({"rope_type": "llama3", "original_max_position_embeddings": 0}, "'original_max"),
        ({"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 1}, "'low_freq_factor'"),
        ({"rope_type": "longrope", "short_factor": [1.0, -1.0]}, "'short_factor'"),
        ({"rope_type": "longrope", "short_factor": [1], "long_factor": [1, 2]}, "'long_factor'"),
        ({"full_attention": {"rope_type": "linear", "factor": -1}}, "'factor': -1"),
        (7, "not an object"),
    ],
)
def test_rope_parameters_that_give_no_frequencies_are_refused(
    copy: Callable[[str], Path], rope: Any, words: str
) -> None:
    folder = copy("llama")
    edit_config(folder, rope_parameters=rope)
    refuse(folder, words)


@pytest.mark.parametrize("rope", [None, False, {}])
def test_no_rope_parameters_are_none(rope: Any) -> None:
    check_rope({"rope_theta": 10000.0, "rope_scaling": rope})


def test_a_deeply_nested_or_huge_config_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refuse(folder, "cannot be read as JSON: maximum recursion depth")
    with (folder / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)  # takes no space
    refuse(folder, "larger than 64 MiB")


def test_an_error_at_a_config_that_no_check_foresaw_is_one_sentence(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy("llama")
    edit_config(folder, architectures=["LlamaForSequenceClassification"], id2label={"x": "y"})
    config = ServerConfig(model_path=str(folder))
    with pytest.raises(ConfigError, match=r"can't be loaded: .*ValueError: invalid literal") as at:
        prepare(config)
    assert len(str(at.value).splitlines()) == 1
    folder = copy("qwen2")
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}
    edit_config(folder, rope_parameters={**rope, "original_max_position_embeddings": 64})
    config = ServerConfig(model_path=str(folder))
    with pytest.raises(ConfigError, match=r"can't be loaded: .*tensor") as at:
        load_for_worker(config, make_device(torch.device("cpu")), TensorParallel(), LayerKernels())
    assert len(str(at.value).splitlines()) == 1


def test_an_unknown_quantization_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit_config(folder, quantization_config={"quant_method": "hqq"})
    refuse(folder, r"quantized \(hqq\)")


def test_packed_weights_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    packed = {"model.norm.weight": torch.ones(64, dtype=torch.uint8)}
    edit_weights(folder, lambda tensors: tensors.update(packed))
    refuse(folder, r"U8 tensors \(model.norm.weight\): weights of this form")


def test_a_spoiled_file_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for spoiled in (
        whole[:-10],
        whole + b"x",
        whole[:100],
        b"",
        whole[:8] + b"x" * (len(whole) - 8),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    ):
        file.write_bytes(spoiled)
        refuse(folder, "no readable safetensors file: .* download did not finish|git lfs pull")


def test_a_missing_shard_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    refuse(tmp_path, victim.name)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse(folder, r"save_pretrained")
    (folder / "pytorch_model.bin").unlink()
    refuse(folder, "holds no weights")


def test_tensors_that_do_not_fit_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen2")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.q_proj.bias"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(65)

    edit_weights(folder, spoil)
    with pytest.raises(ConfigError) as error:
        load_model(folder)
    message = str(error.value)
    assert "1 missing (model.layers.1.self_attn.q_proj.bias)" in message
    assert "1 unexpected (model.layers.9.mlp.up_proj.weight)" in message
    assert "1 misshapen (model.norm.weight is [65], expected [64])" in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [("self_attn.qkv_proj", (8, 64)), ("mlp.gate_up_proj", (191, 64))],
)
def test_misshapen_fused_projections_are_named(
    copy: Callable[[str], Path], name: str, shape: tuple[int, int]
) -> None:
    folder = copy("phi3")
    full_name = f"model.layers.0.{name}.weight"
    edit_weights(folder, lambda tensors: tensors.update({full_name: torch.ones(shape)}))
    with pytest.raises(ConfigError, match=full_name):
        load_model(folder)


def test_an_unknown_rope_type_or_activation_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("mistral")
    edit_config(folder, hidden_act="relu")
    with pytest.raises(ConfigError, match="'relu' is not supported"):
        load_model(folder)
    edit_config(folder, hidden_act="silu", rope_parameters={"rope_type": "cubic"})
    with pytest.raises(ConfigError, match="'cubic' is not supported"):
        load_model(folder)


# What the supervisor asks


def test_model_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path
    assert resolve_model_path("demo").name == "demo_model"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model_path(str(tmp_path / "file"))
    for nowhere in ("./nowhere", str(tmp_path / "nowhere"), "nowhere"):
        with pytest.raises(ConfigError, match="no such folder"):
            resolve_model_path(nowhere)

    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(
        ConfigError, match=r"not in the hub's cache on this machine, and the hub cannot be reached"
    ):
        resolve_model_path("someone/some-model")


def test_context_length_is_the_checkpoints_word() -> None:
    assert context_length({"max_position_embeddings": 4096}) == 4096
    assert context_length({"text_config": {"max_position_embeddings": 8192}}) == 8192
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for longest in (32768, 131072):
        assert context_length({"max_position_embeddings": longest, "rope_scaling": yarn}) == 131072
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        context_length({})


def test_generation_defaults_join_the_end_tokens_of_both_files(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("llama")
    settings = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [7, 5], "max_length": 20}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    expected = {"temperature": 0.6, "top_p": 0.9, "eos_token_ids": [2, 5, 7]}
    assert generation_config(folder) == expected
    (folder / "generation_config.json").unlink()
    assert generation_config(folder) == {"eos_token_ids": [2]}


def test_the_early_checks_import_no_torch() -> None:
    code = "import sys, radixrt.models.checkpoint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(("tp", "name"), [(3, "num_attention_heads"), (4, "num_key_value_heads")])
def test_heads_that_the_ranks_cannot_share_are_refused(tp: int, name: str) -> None:
    config: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
    config["architectures"] = ["LlamaForCausalLM"]
    check_ranks(config, 2)
    with pytest.raises(ConfigError, match=f"{name} .* over --tp {tp} ranks"):
        check_ranks(config, tp)


def test_recurrent_layers_are_refused_on_a_gpu(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="run on a CPU; on a GPU they are not supported yet"):
        load_model(checkpoint("lfm2"), device="cuda")


class FirstCalls(TorchDispatchMode):
    """Records how many numbers the first call of each function of torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in FUNCTIONS and args[0].device.type == "cpu":
            self.sizes.setdefault((name, args[0].dtype), args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_the_first_call_of_a_function_is_of_one_thread(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    """Otherwise oneMKL may compute a part of it with low precision, once in a hundred starts."""
    folder = checkpoint(architecture)
    call_functions_once.cache_clear()
    with FirstCalls() as calls:
        load_model(folder)
    used = {name for name, _ in calls.sizes}
    assert {"cos", "sin"} <= used and set(calls.sizes.values()) == {1}
