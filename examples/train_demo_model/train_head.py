"""Trains an EAGLE-3 head for the demo model for a number of minutes, and writes it as a folder for
``--draft-model``.

The texts are those of the model's own training; what is learned are the model's probabilities of
the tokens of answers. As in EAGLE-3's training-time test, the head also reads its own output in
place of the model's states, as it does when it drafts several tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import torch
from batches import END_OF_TEXT, LENGTHS, Batch, encode_sample, make_batch
from head import Head, HeadShape, states_and_scores
from model import Llama, LlamaShape
from muon import Muon
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

LONGEST_LEVEL = 5
COUNTED_SAMPLES = 2000
"""Samples by whose answers the head's vocabulary is chosen."""
LOG_EVERY = 20
"""Seconds."""


def load(folder: Path) -> Llama:
    """The model of a folder."""
    config = json.loads((folder / "config.json").read_text())
    shape = LlamaShape(**{k: config[k] for k in LlamaShape.__dataclass_fields__})
    model = Llama(shape, stream=torch.float32)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in weights.items()})
    return model.requires_grad_(False)


def frequent_tokens(tokenizer: Tokenizer, count: int, seed: int) -> Tensor:
    """The most frequent token ids [count] of answers, ascending."""
    rng, found = random.Random(seed), Counter({END_OF_TEXT: 1})
    tasks = ("qa", "json", "second_turn", "label", "tool", "talk")
    for index in range(COUNTED_SAMPLES):
        row = encode_sample(tokenizer, rng, tasks[index % len(tasks)], index % LONGEST_LEVEL)
        for _, start, end in row.answers:
            found.update(row.tokens[start:end])
    rest = (token for token in range(tokenizer.get_vocab_size()) if token not in found)
    kept = [token for token, _ in found.most_common(count)]
    kept += [token for token, _ in zip(rest, range(count - len(kept)), strict=False)]
    return torch.tensor(sorted(kept))


class Trainer:
    """A head and its optimizers."""

    def __init__(self, model: Llama, token_ids: Tensor, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.model, self.length = model, args.length
        self.head = Head(HeadShape(draft_vocab_size=len(token_ids)), model, token_ids)
        matrices = [
            p for n, p in self.head.named_parameters() if p.ndim == 2 and "lm_head" not in n
        ]
        others = [p for n, p in self.head.named_parameters() if p.ndim == 1 or "lm_head" in n]
        self.optimizers = (
            (Muon(matrices), args.muon_lr),
            (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), args.adam_lr),
        )

    def learn(self, batch: Batch, rate: float) -> tuple[float, list[float]]:
        """Run one step. Returns its loss, and for each token of a chain the share of positions
        where it is the model's likeliest, given that those before it are right."""
        tokens = batch.tokens
        states, last = states_and_scores(self.model, self.head.s.layers, tokens)
        width = tokens.shape[1]
        chosen = batch.positions[batch.weights >= 1.0]
        chosen = chosen[chosen % width >= 1]  # the position of the token that is read last
        scores = self.model.logits(last.view(-1, last.shape[-1])[chosen])
        expected = scores[:, self.head.token_ids].softmax(-1)
        is_drafted = torch.isin(scores.argmax(-1), self.head.token_ids).float()
        best, loss, shares = scores.argmax(-1), 0.0, []
        places = chosen // width * (width - 1) + chosen % width - 1
        for step, hidden in enumerate(self.head.chains(tokens, states, self.length)):
            rows = self.head.lm_head(hidden.reshape(-1, hidden.shape[-1])[places])
            losses = -(expected * rows.log_softmax(-1)).sum(-1)
            loss = loss + 0.8**step * (losses * is_drafted).mean()
            shares.append(float((self.head.token_ids[rows.argmax(-1)] == best).float().mean()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer, base in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * rate
            optimizer.step()
        self.head.zero_grad()
        return float(loss.detach()), shares


def export(head: Head, out: Path) -> None:
    """Write a head in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: p.detach().to(torch.bfloat16).contiguous() for name, p in head.named_parameters()
    }
    tensors["d2t"] = (head.token_ids - torch.arange(len(head.token_ids))).to(torch.int32)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(head.s.hf_config(), indent=2) + "\n")


def train(trainer: Trainer, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Train until the minutes are over."""
    begun = last_log = time.monotonic()
    losses, shares, tokens_seen, step = [], [], 0, 0
    while (spent := time.monotonic() - begun) < 60 * args.minutes:
        rng = random.Random(f"{args.seed}:{step}")
        level = rng.randint(1, LONGEST_LEVEL)
        size = max(args.tokens_per_step, LENGTHS[level])
        batch = make_batch(tokenizer, rng, level, size, 0.0)
        left = 1 - spent / (60 * args.minutes)
        loss, right = trainer.learn(batch, min(1.0, (step + 1) / 30, max(0.02, left / 0.5)))
        losses.append(loss)
        shares.append(right)
        tokens_seen += batch.tokens.numel()
        step += 1
        if time.monotonic() - last_log > LOG_EVERY:
            mean = [round(sum(column) / len(column), 3) for column in zip(*shares, strict=True)]
            spent = time.monotonic() - begun
            print(f"{spent / 60:.1f} min, step {step}, loss {sum(losses) / len(losses):.3f}, right {mean}, {tokens_seen / spent:.0f} tokens/s", flush=True)  # fmt: skip
            losses, shares, last_log = [], [], time.monotonic()
            export(trainer.head, args.out)
    export(trainer.head, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the trained model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--length", type=int, default=3, help="tokens of a chain")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--muon-lr", type=float, default=0.005)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    token_ids = frequent_tokens(tokenizer, HeadShape.draft_vocab_size, args.seed)
    train(Trainer(load(args.model), token_ids, args), tokenizer, args)


if __name__ == "__main__":
    main()
