"""EAGLE-3 heads of random weights, and one in plain PyTorch to compare with; and what heads draft in
a test."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixrt.models.draft_head import DraftHead
from radixrt.worker.drafts.drafters import Draft
from radixrt.worker.drafts.head import HeadDrafter
from radixrt.worker.drafts.price import Chance, Chances, DraftPrice

DRAFT_VOCAB = 100


def make_head(
    folder: Path, model: dict[str, Any], kind: str = "sglang", seed: int = 0, **changes: Any
) -> Path:
    """Write a head for a model of this config.

    Args:
        kind: ``sglang`` or ``speculators``: the names of tensors and of the config's fields.
        changes: of the config.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab = model["hidden_size"], model["vocab_size"]
    layer = {
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "max_position_embeddings": model["max_position_embeddings"],
        "rope_theta": 5000.0,
    }
    if kind == "sglang":
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **layer,
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]},
        }
        prefix = "midlayer."
    else:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "target_hidden_size": model["hidden_size"],
        }
        prefix = "layers.0."
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(hidden, generator=generator)

    heads, kv_heads, dim = 4, 2, 16
    chosen = torch.randperm(vocab, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors = {
        "fc.weight": random(hidden, 3 * model["hidden_size"]),
        f"{prefix}hidden_norm.weight": norm(),
        f"{prefix}input_layernorm.weight": norm(),
        f"{prefix}post_attention_layernorm.weight": norm(),
        f"{prefix}self_attn.q_proj.weight": random(heads * dim, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": random(kv_heads * dim, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": random(kv_heads * dim, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": random(hidden, heads * dim),
        f"{prefix}mlp.gate_proj.weight": random(96, hidden),
        f"{prefix}mlp.up_proj.weight": random(96, hidden),
        f"{prefix}mlp.down_proj.weight": random(hidden, 96),
        "norm.weight": norm(),
        "lm_head.weight": 4 * random(DRAFT_VOCAB, hidden),
        "d2t": chosen - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True),
    }
    if kind == "speculators":
        tensors["embed_tokens.weight"] = random(vocab, hidden)
    save_file(tensors, folder / "model.safetensors")
    return folder


class PlainHead:
    """A head as its authors describe it, without a cache."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        """
        Args:
            embedding: [vocab_size, hidden_size] of the model.
        """
        config = json.loads((folder / "config.json").read_text())
        self.config = {**config, **config.get("transformer_layer_config", {})}
        tensors = load_file(folder / "model.safetensors")
        self.weights = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
        self.embedding = self.weights.get("embed_tokens.weight", embedding)
        drafted = torch.arange(self.config["draft_vocab_size"])
        self.token_ids = drafted + self.weights["d2t"]

    @property
    def layers(self) -> list[int]:
        """Layers whose inputs are read."""
        if (given := self.config.get("eagle_aux_hidden_state_layer_ids")) is not None:
            return list(given)
        outputs = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return [layer + 1 for layer in outputs]

    def chain(self, token_ids: list[int], states: Tensor, length: int) -> list[Tensor]:
        """The logits [draft_vocab_size] of ``length`` draft tokens, each the likeliest, behind
        ``token_ids``.

        Args:
            states: [len(token_ids) - 1, 3 * hidden_size] of the model.
        """
        rows = states @ self.weights["fc.weight"].T
        tokens, chain = token_ids[1:], []
        for _ in range(length):
            hidden = self._layer(torch.tensor(tokens), rows)
            normed = self._norm(hidden[-1:], "norm.weight")
            chain.append((normed @ self.weights["lm_head.weight"].T)[0])
            tokens = [*tokens, int(self.token_ids[chain[-1].argmax()])]
            rows = torch.cat((rows, hidden[-1:]))
        return chain

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config["rms_norm_eps"])

    def _layer(self, tokens: Tensor, states: Tensor) -> Tensor:
        of, c = self.weights, self.config
        normed = self._norm(states, "midlayer.hidden_norm.weight")
        embedded = self._norm(self.embedding[tokens], "midlayer.input_layernorm.weight")
        read = torch.cat((embedded, normed), -1)
        residual = normed if c.get("norm_before_residual") else states
        dim, group = c["head_dim"], c["num_attention_heads"] // c["num_key_value_heads"]
        query, key, value = (
            (read @ of[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(1, (-1, dim))
            for name in "qkv"
        )
        query, key = self._rotate(query), self._rotate(key)
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output = attended.transpose(0, 1).flatten(1) @ of["midlayer.self_attn.o_proj.weight"].T
        residual = residual + output
        hidden = self._norm(residual, "midlayer.post_attention_layernorm.weight")
        gate = F.silu(hidden @ of["midlayer.mlp.gate_proj.weight"].T)
        up = hidden @ of["midlayer.mlp.up_proj.weight"].T
        return residual + (gate * up) @ of["midlayer.mlp.down_proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        dim = x.shape[-1]
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.outer(torch.arange(len(x)).float(), frequencies)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


# ------------------------------------------------------------ what heads draft


@dataclass
class Drafted:
    """One call of a head: the texts behind which it drafts, by slot, and what it gives."""

    texts: dict[int, list[int]]
    logits: list[Tensor] = field(default_factory=list)


def watch_drafts(monkeypatch: pytest.MonkeyPatch, kind: type[DraftHead]) -> list[Drafted]:
    """What heads draft in a test: at any price, though hardly any token is accepted."""
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.0)
    monkeypatch.setattr(DraftPrice, "beside_prompts", lambda self, *_: 0.0)
    monkeypatch.setattr(DraftPrice, "of_head", lambda self, rows: 0.0)
    monkeypatch.setattr(Chances, "estimate", lambda self, source: Chance(0.9, 0.9))
    calls: list[Drafted] = []
    draft, logits = HeadDrafter.draft, kind.logits

    def watched(drafter: HeadDrafter, wanted: dict[int, int], *_: object) -> None:
        ready = [slot for slot in wanted if drafter._is_ready(drafter._followed[slot])]
        calls.append(Drafted({slot: list(drafter._followed[slot].text) for slot in ready}))
        draft(drafter, {slot: min(n, 4) for slot, n in wanted.items()}, -1.0)

    def kept(head: DraftHead, hidden: Tensor) -> Tensor:
        found = logits(head, hidden)
        calls[-1].logits.append(found.clone())
        return found

    monkeypatch.setattr(HeadDrafter, "draft", watched)
    monkeypatch.setattr(kind, "logits", kept)
    return calls


def check_drafts(drafted: list[Drafted], chain: Callable[[list[int], int], list[Tensor]]) -> int:
    """Compare drafts with those of a reference; returns their number.

    Args:
        chain: gives the logits of so many draft tokens behind a text.
    """
    count = 0
    for one in drafted:
        for row, text in enumerate(one.texts.values()):
            # rows stay in one order while all slots go on
            found = [rows for rows in one.logits if len(rows) == len(one.texts)]
            for mine, theirs in zip(found, chain(text, len(found)), strict=True):
                torch.testing.assert_close(mine[row], theirs, rtol=1e-4, atol=1e-4)
            count += bool(found)
    return count


class Foresight:
    """Puts tokens that the model will give into a head's drafts, and some that it will not. The
    head computes its own all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[list[int]] = []
        self._rng = random.Random(0)
        self._draft = HeadDrafter.draft
        monkeypatch.setattr(HeadDrafter, "draft", lambda *args: self.draft(*args))

    def draft(self, drafter: HeadDrafter, *arguments: Any) -> None:
        self._draft(drafter, *arguments)
        for slot in drafter._drafts:
            text = drafter._followed[slot].text
            coming = next((t[len(text) :] for t in self.texts if t[: len(text)] == text), [])
            tokens = coming[: self._rng.randint(1, 6)]
            if tokens and self._rng.random() < 0.4:
                tokens[self._rng.randrange(len(tokens))] ^= 1
            if tokens:
                drafter._drafts[slot] = Draft(tokens)
