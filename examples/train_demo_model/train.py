"""How does the demo model learn to look things up? Repeats first, then documents that grow."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import LENGTHS, make_batch
from model import Llama, LlamaShape, plant_induction
from tokenizers import Tokenizer
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton-Schulz (Jordan 2024); for the hidden matrices."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p)
                buffer = state["buffer"].lerp_(p.grad, 1 - group["momentum"])
                by_shape[p.shape].append((p, p.grad.lerp(buffer, group["momentum"])))
            for shape, pairs in by_shape.items():
                update = orthogonalize(torch.stack([u for _, u in pairs]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (p, _), u in zip(pairs, update, strict=True):
                    p.add_(u.to(p.dtype), alpha=-group["lr"] * scale)


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrices with orthonormal rows, roughly. g: [n, rows, cols]."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Progress:
    """Where training stands: the level it has reached and its running exact match a task."""

    def __init__(self) -> None:
        self.level = -1
        self.steps_here = 0
        self.match: dict[str, float] = {}  # "task@level" -> running exact match

    def add(self, level: int, matches: dict[str, list[bool]]) -> None:
        for task, hits in matches.items():
            for key in (f"{task}@{level}",):
                old = self.match.get(key)
                mean = sum(hits) / len(hits)
                self.match[key] = mean if old is None else 0.95 * old + 0.05 * mean
        self.steps_here += level == self.level

    def promote(self, last_level: int) -> bool:
        if self.level >= last_level or self.steps_here < (60 if self.level < 0 else 40):
            return False
        here = lambda task: self.match.get(f"{task}@{self.level}", 0.0)  # noqa: E731
        ready = here("repeat") > 0.5 if self.level < 0 else here("qa") > 0.72
        if ready:
            self.level += 1
            self.steps_here = 0
        return ready


def choose_level(rng: random.Random, top: int, last: int) -> int:
    """Mostly the newest level while the levels are low; then every level, since long rows are costly."""
    chance = rng.random()
    if top <= 0 or chance < (0.65 if top < 5 else 0.2):
        return top
    if chance < 0.85 or top < 4 or top == last:
        return rng.randrange(min(top, 2), top)
    return rng.randint(top + 1, last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="checkpoints and log go here")
    parser.add_argument(
        "--minutes", type=float, default=120, help="of training, all resumes together"
    )
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--norm-lr", type=float, default=3e-3)
    parser.add_argument("--embed-lr", type=float, default=6e-4)
    parser.add_argument("--repeat-share", type=float, default=0.15)
    parser.add_argument("--layers", type=int, default=LlamaShape.num_hidden_layers)
    parser.add_argument(
        "--decay", type=float, default=0.5, help="last share of the minutes, with falling rates"
    )
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    if os.environ.get("PID_FILE"):
        Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))

    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    shape = LlamaShape(vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=args.layers)
    model = Llama(shape)
    plant_induction(model)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    others = [*norms, model.embed_tokens.weight]
    muon = Muon(matrices, lr=args.muon_lr)
    groups = [
        {"params": norms, "base": args.norm_lr},
        {"params": [model.embed_tokens.weight], "base": args.embed_lr},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    muon.param_groups[0]["base"] = args.muon_lr
    progress, step, seconds = Progress(), 0, 0.0

    args.run.mkdir(parents=True, exist_ok=True)
    checkpoint = args.run / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        muon.load_state_dict(saved["muon"])
        adam.load_state_dict(saved["adam"])
        progress.__dict__.update(saved["progress"])
        step, seconds = saved["step"], saved["seconds"]
        muon.param_groups[0]["base"] = args.muon_lr

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "muon": muon.state_dict(),
            "adam": adam.state_dict(),
            "progress": progress.__dict__,
            "step": step,
            "seconds": seconds,
            "shape": shape.__dict__,
        }
        torch.save(state, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)

    forward = model if args.no_compile else torch.compile(model, dynamic=False)
    torch._dynamo.config.cache_size_limit = 64
    log = (args.run / "log.jsonl").open("a")
    last_save = last_print = time.monotonic()
    tokens_seen, loss_sum, loss_n = 0, 0.0, 0
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    while seconds < 60 * args.minutes and not stop:
        began = time.monotonic()
        rng = random.Random(f"{args.seed}:{step}")
        level = choose_level(rng, progress.level, len(LENGTHS) - 1)
        size = max(args.tokens_per_step, 2 * LENGTHS[max(level, 0)])
        batch = make_batch(tokenizer, rng, level, size, args.repeat_share)

        done = seconds / (60 * args.minutes)
        factor = min(1.0, (step + 1) / 50, max(0.02, (1 - done) / args.decay))
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * factor
        with torch.autocast("cpu", torch.bfloat16):
            hidden = forward(batch.tokens)
            logits = model.logits(hidden.view(-1, shape.hidden_size)[batch.positions]).float()
        losses = F.cross_entropy(logits, batch.targets, reduction="none")
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        for p in model.parameters():
            p.grad = None

        right = logits.detach().argmax(-1) == batch.targets
        matches: dict[str, list[bool]] = defaultdict(list)
        for task, a, b in batch.answers:
            matches[task].append(bool(right[a:b].all()))
        progress.add(level, matches)
        promoted = progress.promote(len(LENGTHS) - 1)
        step += 1
        tokens_seen += batch.tokens.numel()
        loss_sum, loss_n = loss_sum + loss.item(), loss_n + 1
        now = time.monotonic()
        seconds += min(now - began, 10.0)  # a stopped process does not use up its minutes
        if promoted or now - last_print > 15:
            top = {
                k: round(v, 3)
                for k, v in progress.match.items()
                if k.endswith(f"@{progress.level}") or k.endswith(f"@{progress.level - 1}")
            }
            row = {
                "step": step,
                "minutes": round(seconds / 60, 2),
                "level": progress.level,
                "loss": round(loss_sum / loss_n, 4),
                "tokens_per_second": round(tokens_seen / (now - last_print)),
                "match": top,
            }
            print(json.dumps(row), file=log, flush=True)
            print(row, flush=True)
            tokens_seen, loss_sum, loss_n, last_print = 0, 0.0, 0, now
        if promoted or now - last_save > 180:
            save()
            last_save = now
    save()


if __name__ == "__main__":
    main()
