"""Trains ``tiny-chat`` from nothing: tokenizer, data, network, held-out accuracy and export.

``python examples/train_tiny_chat/train.py --out DIR --minutes 8`` does everything. The data depend on the seed
alone; with ``--steps`` instead of ``--minutes`` so does the number of updates.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

# Run as a script, Python finds the files beside this one but not the package that they form.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from train_tiny_chat.card import Accuracies, write_card
from train_tiny_chat.evaluation import accuracy_by_skill
from train_tiny_chat.export import export_checkpoint, rounded_weights
from train_tiny_chat.network import Network, Shape
from train_tiny_chat.noise import perturbed
from train_tiny_chat.packing import Kinds, ShardStream, Tokens, pack
from train_tiny_chat.questions import Question, quality_set
from train_tiny_chat.tokenizer import build_tokenizer
from train_tiny_chat.tool_conversation import ToolQuestion, tool_questions

LOSS_WEIGHTS = (0.0, 0.05, 1.0, 0.3)
"""Loss weight of padding, prompts, answers and plain text."""

PEAK_LEARNING_RATE = 2e-3
WARM_UP_STEPS = 300
DECAY_FROM = 0.4
LONG_ROWS_FROM = 0.7
SHORT_LENGTH, LONG_LENGTH = 1024, 2048
TOOL_SHARE = 0.25
"""Of the documents, those in which the user offers tools."""
NOISE = 0.05


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall-clock budget of the training")
    parser.add_argument("--steps", type=int, help="number of updates, instead of a time budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=64, help="rows per update")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--evaluate-every", type=float, default=60.0, help="seconds between evaluations")
    parser.add_argument("--questions", type=int, default=60, help="final questions per skill")
    parser.add_argument("--learning-rate", type=float, default=PEAK_LEARNING_RATE)
    parser.add_argument("--start-from", type=Path, help="a checkpoint to go on from, with its tokenizer")
    return parser.parse_args()


def _optimizer(network: Network, learning_rate: float, fused: bool) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in network.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in network.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)


def _print_accuracies(accuracies: Accuracies) -> None:
    print("   " + "  ".join(f"{skill} {value:.3f}" for skill, (_, value) in accuracies.items()), flush=True)


class Trainer:
    """Runs the two stages: rows of 1024 tokens first, then rows that fill the whole context."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("high")
        self.network = Network(Shape())
        if arguments.start_from is None:
            self.tokenizer = build_tokenizer(arguments.seed)
        else:
            self.tokenizer = Tokenizer.from_file(str(arguments.start_from / "tokenizer.json"))
            self.network.load_state_dict(load_file(str(arguments.start_from / "model.safetensors")))
        self.network.to(self.device)
        if self.device.type == "cuda":
            # The layers share one compiled graph, so compilation takes seconds.
            for layer in self.network.model.layers:
                layer.compile(dynamic=False)
            self.network.weighted_loss = torch.compile(  # type: ignore[method-assign]
                self.network.weighted_loss, dynamic=False
            )
        self.optimizer = _optimizer(self.network, arguments.learning_rate, self.device.type == "cuda")
        self.loss_weights = torch.tensor(LOSS_WEIGHTS, device=self.device)
        self.probe = [*quality_set(40, seed=1), *tool_questions(40, seed=1)]
        self.step = 0
        self.tokens = 0
        self.started = time.monotonic()
        self.last_evaluation = self.started

    def progress(self) -> float:
        """The share of the training that is done, from 0 to 1."""
        if self.arguments.steps is not None:
            return float(min(1.0, self.step / self.arguments.steps))
        budget: float = 60.0 * self.arguments.minutes
        return min(1.0, (time.monotonic() - self.started) / budget)

    def _learning_rate(self, progress: float) -> float:
        warm_up = min(1.0, (self.step + 1) / WARM_UP_STEPS)
        decay = min(1.0, (1.0 - progress) / (1.0 - DECAY_FROM))
        return float(self.arguments.learning_rate * warm_up * decay)

    def _update(self, tokens: Tokens, kinds: Kinds, progress: float) -> torch.Tensor:
        batch = torch.from_numpy(tokens.astype("int32")).to(self.device, non_blocking=True).long()
        weights = self.loss_weights[torch.from_numpy(kinds.astype("int32")).to(self.device, non_blocking=True).long()]
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(progress)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.network.loss(batch, weights)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.tokens += tokens.size
        return loss.detach()

    def _report(self, loss: torch.Tensor) -> None:
        seconds = time.monotonic() - self.started
        rate = self.tokens / seconds / 1e6
        print(
            f"{seconds:6.1f} s  step {self.step}  {self.tokens / 1e6:.1f}M tokens ({rate:.2f}M/s)  "
            f"loss {loss.item():.4f}",
            flush=True,
        )

    def stage(self, stream: ShardStream[tuple[Tokens, Kinds]], name: str, length: int, until: float) -> None:
        """Trains on rows of one length until the given share of the training is done."""
        rows = self.arguments.rows
        for tokens, kinds in stream.shards(name, 16 * rows, length, "tiny-chat", TOOL_SHARE):
            for start in range(0, len(tokens), rows):
                progress = self.progress()
                if progress >= until:
                    return
                loss = self._update(tokens[start : start + rows], kinds[start : start + rows], progress)
                if self.step % 200 == 0 or self.step == 1:
                    self._report(loss)
                if time.monotonic() - self.last_evaluation > self.arguments.evaluate_every:
                    self._report(loss)
                    self.evaluate_probe()
                    self.last_evaluation = time.monotonic()

    def evaluate_probe(self) -> None:
        """Prints the accuracy on a small held-out set and saves what has been learned."""
        _print_accuracies(self._accuracies(self.probe))
        export_checkpoint(self.network, self.tokenizer, self.arguments.out)

    def _accuracies(self, questions: Sequence[Question | ToolQuestion]) -> Accuracies:
        # Questions have many lengths, so evaluation must not go through the compiled layers.
        with torch.compiler.set_stance("force_eager"):
            return accuracy_by_skill(self.network, self.tokenizer, questions)

    def finish(self) -> None:
        """Exports, measures the exported weights with and without noise, and writes the model card."""
        minutes = (time.monotonic() - self.started) / 60
        out: Path = self.arguments.out
        export_checkpoint(self.network, self.tokenizer, out)
        of_tools = tool_questions(self.arguments.questions, seed=0)
        questions = quality_set(self.arguments.questions, seed=0)
        weights = rounded_weights(self.network)
        self.network.load_state_dict(weights)
        clean, clean_tools = self._accuracies(questions), self._accuracies(of_tools)
        self.network.load_state_dict(perturbed(weights, NOISE, seed=0))
        noisy, noisy_tools = self._accuracies(questions), self._accuracies(of_tools)
        for each, tools in ((clean, clean_tools), (noisy, noisy_tools)):
            each |= {skill if skill != "total" else "tools": value for skill, value in tools.items()}
        print(f"after {self.tokens / 1e6:.0f}M tokens, {self.step} steps, {minutes:.2f} minutes:")
        for skill, (count, value) in clean.items():
            print(f"   {skill:14s} n={count:5d}  {value:.4f}  with noise {noisy[skill][1]:.4f}")
        command = " ".join(["python", *sys.argv])
        write_card(self.network, out, clean, noisy, self.tokens, minutes, command)


def main() -> None:
    """Runs the whole training."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = _arguments()
    trainer = Trainer(arguments)
    stream = ShardStream(pack, trainer.tokenizer, arguments.seed, arguments.workers)
    try:
        trainer.stage(stream, "short", SHORT_LENGTH, LONG_ROWS_FROM)
        trainer.stage(stream, "long", LONG_LENGTH, 1.0)
    finally:
        stream.close()
    trainer.finish()


if __name__ == "__main__":
    main()
