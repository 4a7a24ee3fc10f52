"""Trains the demo model for a number of minutes."""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import LENGTHS, Batch, make_batch
from curriculum import Curriculum
from model import Llama, LlamaShape, plant_induction
from muon import Muon
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

LOG_EVERY, SAVE_EVERY = 15, 180  # seconds


class Trainer:
    """The content of a checkpoint: the model, its optimizers and its curriculum."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        torch.manual_seed(args.seed)
        self.shape = LlamaShape(vocab_size=vocab_size)
        self.model = Llama(self.shape)
        plant_induction(self.model)
        self.model.to(args.device)
        self.forward = torch.compile(self.model, dynamic=False)
        self.device = args.device
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        norms = [p for p in self.model.parameters() if p.ndim == 1]
        embedding = self.model.embed_tokens.weight
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [{"params": norms}, {"params": [embedding]}], betas=(0.9, 0.98), weight_decay=0.0
        )
        self.rates = (
            (self.muon.param_groups[0], args.muon_lr),
            (self.adam.param_groups[0], args.norm_lr),
            (self.adam.param_groups[1], args.embed_lr),
        )
        self.clipped = [*norms, embedding]
        self.curriculum = Curriculum()
        self.step = 0
        self.seconds = 0.0

    def learn(self, batch: Batch, rate: float) -> tuple[float, dict[str, list[bool]]]:
        """Run one step. Return its loss, and per task which answers were exactly correct.

        Answers are evaluated with teacher forcing, which accepts the same answers as greedy
        decoding. Names are new in every batch, so this is a test.
        """
        for group, base in self.rates:
            group["lr"] = base * rate
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.forward(batch.tokens.to(self.device))
            chosen = hidden.view(-1, self.shape.hidden_size)[batch.positions.to(self.device)]
            logits = self.model.logits(chosen).float()
        targets, weights = batch.targets.to(self.device), batch.weights.to(self.device)
        losses = F.cross_entropy(logits, targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.clipped, 1.0)
        self.muon.step()
        self.adam.step()
        self.model.zero_grad()
        self.step += 1
        right = (logits.detach().argmax(-1) == targets).cpu()
        answered = defaultdict(list)
        for task, start, end in batch.answers:
            answered[task].append(bool(right[start:end].all()))
        return loss.item(), answered

    def save(self, path: Path) -> None:
        """Write a new file and rename it, so that a kill leaves a complete checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "progress": asdict(self.curriculum),
            "step": self.step,
            "seconds": self.seconds,
            "shape": asdict(self.shape),
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def resume(self, path: Path) -> None:
        saved = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.muon.load_state_dict(saved["muon"])
        self.adam.load_state_dict(saved["adam"])
        self.rates = tuple(
            (group, base)
            for group, (_, base) in zip(
                (*self.muon.param_groups, *self.adam.param_groups), self.rates, strict=True
            )
        )
        self.curriculum = Curriculum(**saved["progress"])
        self.step, self.seconds = saved["step"], saved["seconds"]


def train(trainer: Trainer, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Train until the minutes are over, or until SIGTERM or SIGINT; then write the checkpoint."""
    checkpoint = args.run / "checkpoint.pt"
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: stop.append(n))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    last_log = last_save = time.monotonic()
    losses: list[float] = []
    tokens_seen = 0
    with (args.run / "log.jsonl").open("a") as log, Progress(*columns) as bar:
        shown = bar.add_task("begin", total=60 * args.minutes)
        while trainer.seconds < 60 * args.minutes and not stop:
            began = time.monotonic()
            rng = random.Random(f"{args.seed}:{trainer.step}")
            level = trainer.curriculum.choose(rng)
            size = max(args.tokens_per_step, 2 * LENGTHS[max(level, 0)])
            batch = make_batch(tokenizer, rng, level, size, args.repeat_share)
            left = 1 - trainer.seconds / (60 * args.minutes)
            rate = min(1.0, (trainer.step + 1) / 50, max(0.02, left / args.decay))
            loss, answered = trainer.learn(batch, rate)
            promoted = trainer.curriculum.record(level, answered)
            losses.append(loss)
            tokens_seen += batch.tokens.numel()
            now = time.monotonic()
            trainer.seconds += min(
                now - began, 10.0
            )  # time while the process is stopped does not count
            if promoted or now - last_log > LOG_EVERY:
                row = {
                    "step": trainer.step,
                    "minutes": round(trainer.seconds / 60, 2),
                    "level": trainer.curriculum.level,
                    "loss": round(sum(losses) / len(losses), 4),
                    "tokens_per_second": round(tokens_seen / (now - last_log)),
                    "match": trainer.curriculum.newest_matches(),
                }
                print(json.dumps(row), file=log, flush=True)
                bar.console.print(json.dumps(row), soft_wrap=True, markup=False)
                losses, tokens_seen, last_log = [], 0, now
            bar.update(
                shown,
                completed=trainer.seconds,
                description=f"step {trainer.step}, level {trainer.curriculum.level}, loss {loss:.3f}",
            )
            if promoted or now - last_save > SAVE_EVERY:
                trainer.save(checkpoint)
                last_save = now
    trainer.save(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument(
        "--run", type=Path, required=True, help="checkpoint and log; resumed if there"
    )
    parser.add_argument(
        "--minutes", type=float, default=80, help="of training, all resumes together"
    )
    parser.add_argument(
        "--decay", type=float, default=0.5, help="last share of them, with falling rates"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--repeat-share", type=float, default=0.15, help="rows of random repeats")
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--norm-lr", type=float, default=3e-3)
    parser.add_argument("--embed-lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64  # one graph per row length
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    trainer = Trainer(args, tokenizer.get_vocab_size())
    args.run.mkdir(parents=True, exist_ok=True)
    if (args.run / "checkpoint.pt").exists():
        trainer.resume(args.run / "checkpoint.pt")
    train(trainer, tokenizer, args)


if __name__ == "__main__":
    main()
