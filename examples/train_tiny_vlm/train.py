"""Trains ``tiny-vlm``: pictures, network, held-out accuracy and export. The decoder begins as layers of ``tiny-chat``.

``python examples/train_tiny_vlm/train.py --out DIR --minutes 7`` does everything on one GPU, or slowly on a CPU.
It needs torch, numpy, pillow, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

# Run as a script, Python finds the files beside this one but not the packages that they form.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from train_tiny_chat.card import Accuracies
from train_tiny_chat.export import rounded_weights
from train_tiny_chat.network import Shape
from train_tiny_chat.packing import ShardStream

from train_tiny_vlm.card import write_card
from train_tiny_vlm.evaluation import accuracies, normalized, text_questions, visual_questions
from train_tiny_vlm.export import export_checkpoint
from train_tiny_vlm.network import TowerShape, VisionNetwork
from train_tiny_vlm.rows import IMAGES_PER_UNIT, UNIT, Batches, Filed, file_batches
from train_tiny_vlm.scenes import MOST_SHAPES
from train_tiny_vlm.skills import GOALS
from train_tiny_vlm.tokenizer import IMAGE, image_tokenizer

TEXT_LAYERS = (0, 2, 5, 7)
"""Of ``tiny-chat``: those that the decoder begins with."""

LOSS_WEIGHTS = (0.0, 0.02, 1.0, 0.3)
"""Loss weight of padding, prompts, answers and plain text."""

STAGES = ((3, 0.08), (5, 0.2), (MOST_SHAPES, 1.0))
"""The most shapes of a scene, and the share of the training until which it is so."""

PEAK_LEARNING_RATE = 1.2e-3
WARM_UP_STEPS = 300
DECAY_FROM = 0.4
NOISE = 0.02
"""Added to the normalised pixels, so that nothing depends on exactly flat colours."""

BATCHES_PER_SHARD = 4
TINY_CHAT = Path(__file__).resolve().parents[2] / "asyncllm" / "assets" / "tiny-chat"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=7.0, help="wall-clock budget of the training")
    parser.add_argument("--steps", type=int, help="number of updates, instead of a time budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=320, help=f"rows per update, a multiple of {UNIT}")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that draw")
    parser.add_argument("--evaluate-every", type=float, default=60.0, help="seconds between evaluations")
    parser.add_argument("--questions", type=int, default=200, help="final questions per skill")
    parser.add_argument("--learning-rate", type=float, default=PEAK_LEARNING_RATE)
    parser.add_argument("--text-model", type=Path, default=TINY_CHAT, help="folder of tiny-chat")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    if arguments.rows < 1 or arguments.rows % UNIT:
        parser.error(f"--rows {arguments.rows} is no multiple of {UNIT}")
    return arguments


def _text_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of the decoder at its beginning."""
    chosen = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(TEXT_LAYERS)}
    weights = {}
    for name, tensor in load_file(str(folder / "model.safetensors")).items():
        layer = next((old for old in chosen if name.startswith(old)), None)
        if layer is not None:
            weights[chosen[layer] + name.removeprefix(layer)] = tensor
        elif not name.startswith("model.layers."):
            weights[name] = tensor
    return weights


def _optimizer(network: VisionNetwork, learning_rate: float, fused: bool) -> torch.optim.Optimizer:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)


def _print_accuracies(shares: Accuracies) -> None:
    print("   " + "  ".join(f"{skill} {value:.3f}" for skill, (_, value) in shares.items()), flush=True)


class Trainer:
    """Trains on scenes of few shapes first, then of more."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("high")
        self.tokenizer = image_tokenizer(arguments.text_model)
        text = Shape(layers=len(TEXT_LAYERS))
        self.network = VisionNetwork(TowerShape(), text, self.tokenizer.token_to_id(IMAGE))
        self.network.language_model.load_state_dict(_text_weights(arguments.text_model))
        self.network.to(self.device)
        on_gpu = self.device.type == "cuda"
        if on_gpu and not arguments.eager:
            # The layers of a kind share one compiled graph, so compilation takes seconds.
            text_network = self.network.language_model
            for layer in (*text_network.model.layers, *self.network.vision_tower.vision_model.encoder.layers):
                layer.compile(dynamic=False)
            text_network.weighted_loss = torch.compile(  # type: ignore[method-assign]
                text_network.weighted_loss, dynamic=False
            )
        self.optimizer = _optimizer(self.network, arguments.learning_rate, on_gpu)
        self.loss_weights = torch.tensor(LOSS_WEIGHTS, device=self.device)
        self.probe = (visual_questions(60, seed=1), text_questions(20, seed=1))
        self.step = self.images = 0
        self.started = self.last_evaluation = time.monotonic()
        self.waited = 0.0
        """Seconds in which there was nothing to train on, as the pictures were not drawn yet."""

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

    def _update(self, batches: Batches, rows: slice, images: slice, progress: float) -> torch.Tensor:
        def moved(array: object) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        tokens = moved(batches.tokens[rows].astype("int32")).long()
        weights = self.loss_weights[moved(batches.kinds[rows].astype("int32")).long()]
        pixels = normalized(moved(batches.pixels[images]))
        pixels = pixels + NOISE * torch.randn_like(pixels)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(progress)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.network.loss(tokens, weights, pixels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.images += len(pixels)
        return loss.detach()

    def _report(self, loss: torch.Tensor) -> None:
        seconds = time.monotonic() - self.started
        print(
            f"{seconds:6.1f} s  step {self.step}  {self.images / 1e3:.0f}k images ({self.images / seconds:.0f}/s, "
            f"waited {self.waited:.1f} s)  loss {loss.item():.4f}",
            flush=True,
        )

    def stage(self, stream: ShardStream[Filed], most: int, until: float, folder: Path) -> None:
        """Trains on scenes of at most so many shapes until the given share of the training is done."""
        units = self.arguments.rows // UNIT
        image_length = self.network.tower_shape.tokens
        shards = stream.shards(f"{most}", BATCHES_PER_SHARD * units, image_length, most, folder)
        while True:
            before = time.monotonic()
            batches = next(shards).load()
            self.waited += time.monotonic() - before
            for index in range(BATCHES_PER_SHARD):
                progress = self.progress()
                if progress >= until:
                    return
                rows = slice(index * units * UNIT, (index + 1) * units * UNIT)
                images = slice(index * units * IMAGES_PER_UNIT, (index + 1) * units * IMAGES_PER_UNIT)
                loss = self._update(batches, rows, images, progress)
                if self.step % 200 == 0 or self.step in (1, 20, 50, 100):
                    self._report(loss)
                if time.monotonic() - self.last_evaluation > self.arguments.evaluate_every:
                    self._report(loss)
                    _print_accuracies(self._accuracies(*self.probe))
                    export_checkpoint(self.network, self.tokenizer, self.arguments.out)
                    self.last_evaluation = time.monotonic()

    def _accuracies(self, visual: list, text: list) -> Accuracies:
        # Questions have many lengths, so evaluation must not go through the compiled layers.
        with torch.compiler.set_stance("force_eager"):
            return accuracies(self.network, self.tokenizer, visual, text)

    def finish(self) -> None:
        """Exports, measures the exported weights, and writes the model card."""
        minutes = (time.monotonic() - self.started) / 60
        out: Path = self.arguments.out
        export_checkpoint(self.network, self.tokenizer, out)
        self.network.load_state_dict(rounded_weights(self.network))
        count = self.arguments.questions
        shares = self._accuracies(visual_questions(count, seed=0), text_questions(max(1, count // 4), seed=0))
        print(f"after {self.images / 1e3:.0f}k images, {self.step} steps, {minutes:.2f} minutes:")
        for skill, (asked, value) in shares.items():
            missed = skill in GOALS and value < GOALS[skill]
            print(f"   {skill:18s} n={asked:5d}  {value:.4f}{f'  MISSES {GOALS[skill]}' if missed else ''}")
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "a CPU"
        write_card(self.network, out, shares, self.images, minutes, self.arguments.minutes, device)


def main() -> None:
    """Runs the whole training."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = _arguments()
    trainer = Trainer(arguments)
    stream = ShardStream(file_batches, trainer.tokenizer, arguments.seed, arguments.workers)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for most, until in STAGES:
                trainer.stage(stream, most, until, Path(folder))
        finally:
            stream.close()
    trainer.finish()


if __name__ == "__main__":
    main()
