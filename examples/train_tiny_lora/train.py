"""Train tiny-lora, the adapter that ships with asyncllm: tiny-chat in capital letters. Six minutes on one core.

    python -m examples.train_tiny_lora.train --out asyncllm/assets/tiny-lora

Questions and answers are drawn as for tiny-chat itself (`examples/train_tiny_chat`), and only the factors learn. What
is written is PEFT's format.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..train_tiny_chat.conversation import SKILLS, UPPER_CASE_SKILLS
from ..train_tiny_chat.exchange import draw
from ..train_tiny_chat.network import Network, Shape

BASE = Path(__file__).resolve().parents[2] / "asyncllm" / "assets" / "tiny-chat"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 16
ROWS, ROOM = 16, 60
RATE = 4e-3


class Adapted(nn.Module):
    """A linear layer that stays as it is, and what is learned on top: x W^T + x A^T B^T alpha / rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.t() @ self.b.t()) * (ALPHA / RANK)  # type: ignore[no-any-return]


def adapted_network(base: Path) -> tuple[Network, dict[str, Adapted]]:
    """tiny-chat with factors at all linear layers, by the names that its checkpoint has for them."""
    network = Network(Shape())
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(base / "model.safetensors").items()})
    network.requires_grad_(False)
    adapted = {}
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS:
            adapted[name] = Adapted(module)
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, adapted[name])
    return network, adapted


def example(random: Random, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens of a question with its answer in capital letters, and which of them are learned."""
    names = UPPER_CASE_SKILLS if random.random() < 0.7 else tuple(SKILLS)
    exchange = draw(SKILLS[random.choice(names)], random, ROOM, held_out=False)
    turns = [*exchange.setup, (exchange.question, exchange.answer)]
    tokens, learned = [tokenizer.token_to_id("<|bos|>")], [0]
    for question, answer in turns:
        asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for text, weight in ((asked, 0), (f"{answer.upper()}<|im_end|>", 1), ("\n", 0)):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            tokens += ids
            learned += [weight] * len(ids)
    return tokens, learned


def batch(random: Random, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    rows = [example(random, tokenizer) for _ in range(ROWS)]
    length = min(160, max(len(tokens) for tokens, _ in rows))
    padded = [(tokens + [0] * length, learned + [0] * length) for tokens, learned in rows]
    tokens = torch.tensor([row[:length] for row, _ in padded])
    return tokens, torch.tensor([row[:length] for _, row in padded], dtype=torch.float32)


def train(base: Path, steps: int, seed: int) -> dict[str, Adapted]:
    torch.manual_seed(seed)
    random, tokenizer = Random(f"tiny-lora/{seed}"), Tokenizer.from_file(str(base / "tokenizer.json"))
    network, adapted = adapted_network(base)
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for step in range(steps):
        loss = network.loss(*batch(random, tokenizer))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    return adapted


def write(adapted: dict[str, Adapted], folder: Path) -> None:
    tensors = {}
    for name, module in adapted.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = module.a.detach().to(torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_B.weight"] = module.b.detach().to(torch.bfloat16)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-chat",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train tiny-lora.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--base", type=Path, default=BASE, help="folder of tiny-chat")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write(train(options.base, options.steps, options.seed), options.out)


if __name__ == "__main__":
    main()
