"""Peak memory, predicted by `sage_lite.memory` and measured, for rollouts and training, on the CPU and on a GPU.

    python tests/benchmarks/bench_memory.py [--device cpu|cuda] [--only NAME] [--scale 1]    # both, if there is a GPU

Each case is a Qwen2 with random weights in a process of its own. On the CPU, measured is the growth of the process's
resident memory since before the weights were loaded; on a GPU, what torch has allocated. Prints both and their ratio.
On the CPU the weights' file stays mapped where the model keeps some of it (4-bit) or another format of it (bfloat16):
pages the system may drop, 45 MiB here, which count as resident and are not predicted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCABULARY, PROMPT, COMPLETION = 16_000, 64, 64
CASES = {
    "all weights": {},
    "all weights, plain rows": {"share_prompts": False},
    "all weights, checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"lora": 16},
    "LoRA, KL": {"lora": 16, "beta": 1e-3},
    "LoRA, top-p": {"lora": 16, "top_p": 0.9},
    "LoRA, checkpointing": {"lora": 16, "gradient_checkpointing": True},
    "LoRA, small micro-batch": {"lora": 16, "micro_batch_tokens": 2048},
    "LoRA, bfloat16": {"lora": 16, "dtype": "bfloat16"},
    "LoRA, 4-bit": {"lora": 16, "four_bit": True},
    "LoRA, 4-bit, checkpointing": {"lora": 16, "four_bit": True, "gradient_checkpointing": True},
}


def measure(folder: str, settings: dict) -> dict[str, float]:
    """In the child: predicted and measured bytes of both phases."""
    import bitsandbytes  # noqa: F401  # before the first measurement, like all that follows
    import torch

    from sage_lite import advantages, loading, memory
    from sage_lite.config import TrainConfig
    from sage_lite.policy import load_policy
    from sage_lite.recipes import recipe
    from sage_lite.rollout import sample
    from sage_lite.trainer import train
    from sage_lite.update import update

    config = TrainConfig(model=folder, **settings)
    needs = memory.predict(
        config, loading.load_config(folder), prompt_tokens=PROMPT, max_new_tokens=COMPLETION
    )
    cuda = config.device == "cuda"
    warm_up = TrainConfig(steps=1, batch_size=2, progress=False, lora=1, dtype=config.dtype, device=config.device)
    train(warm_up)  # what libraries allocate once and for all is not the model's

    def reset() -> None:
        gc.collect()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            ctypes.CDLL(None).malloc_trim(0)  # what is freed goes back to the system: resident is what is in use
            Path("/proc/self/clear_refs").write_text("5")  # the highest resident size becomes the present one

    def peak() -> int:
        if cuda:
            return torch.cuda.max_memory_allocated()
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024

    reset()
    start = peak()
    policy = load_policy(
        folder, lora=config.lora, four_bit=config.four_bit or None, dtype=config.dtype, device=config.device,
        keep_reference=config.beta > 0,
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()], lr=1e-6)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, VOCABULARY, (config.batch_size, PROMPT), generator=generator).tolist()
    rewards = torch.zeros(config.batch_size, config.group_size)
    rewards[:, 0] = 1.0
    found = {"rollout": 0, "training": 0}
    for _ in range(2):  # the second time, Adam's moments are there
        reset()
        began = time.perf_counter()
        rollouts = sample(
            policy, prompts, config.group_size, max_new_tokens=COMPLETION, temperature=config.temperature,
            top_p=config.top_p, rollout_batch=config.rollout_batch,
        )  # fmt: skip
        sampled = time.perf_counter()
        found["rollout"] = peak() - start
        reset()
        update(
            policy, optimizer, rollouts, rewards, advantages.sage(rewards), recipe("sage"), beta=config.beta,
            micro_batch_tokens=config.micro_batch_tokens, logits_chunk=config.logits_chunk,
            share_prompts=config.share_prompts, gradient_checkpointing=config.gradient_checkpointing,
        )  # fmt: skip
        found["training"] = peak() - start
        optimizer.zero_grad(set_to_none=True)
        seconds = {"rollout_s": sampled - began, "training_s": time.perf_counter() - sampled}
    tokens = int(rollouts.mask.sum())
    return {
        "rollout": [needs.rollout, found["rollout"]],
        "training": [needs.training, found["training"]],
        "tokens": tokens,
        **seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--only", help="run only the cases with this in their name")
    parser.add_argument("--scale", type=int, default=1, help="times the model's width and depth; a GPU can take 4")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, settings = json.loads(args.child)
        print("RESULT " + json.dumps(measure(folder, settings)))
        return
    import torch

    for device in [args.device] if args.device else ["cpu"] + ["cuda"] * torch.cuda.is_available():
        compare(device, args.scale, args.only)


def compare(device: str, scale: int, only: str | None) -> None:
    """Every case on one device, and the range of the ratios."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sage_lite.loading import no_progress_bar
    from sage_lite.policy import load_policy

    with tempfile.TemporaryDirectory() as folder:
        width = 256 * scale
        shape = Qwen2Config(
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=8 * scale, num_attention_heads=8,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=512, tie_word_embeddings=True,
            eos_token_id=1,
        )  # fmt: skip
        with no_progress_bar():
            Qwen2ForCausalLM(shape).save_pretrained(folder)
        load_policy(device="cpu").tokenizer.save_pretrained(folder)
        print(f"Qwen2, width {width}, {8 * scale} layers, {VOCABULARY} tokens, prompt {PROMPT}, completion "
              f"{COMPLETION}, 4 prompts x 8, on {device}; MiB predicted / measured = ratio")  # fmt: skip
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # keeps tensors out of the heap, which fragments
        ratios = []
        for name, changes in CASES.items():
            if only and only not in name:
                continue
            settings = {"batch_size": 4, "device": device, **changes}
            command = [sys.executable, __file__, "--child", json.dumps([folder, settings])]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            result = json.loads(done.stdout.rpartition("RESULT ")[2])
            line = f"{name:<28}"
            for phase in ("rollout", "training"):
                predicted, measured = (n / 2**20 for n in result[phase])
                line += f"  {phase} {predicted:7.0f} / {measured:7.0f} = {predicted / measured:4.2f}"
                ratios.append(predicted / measured)
            print(f"{line}  {result['tokens'] / (result['rollout_s'] + result['training_s']):.0f} tokens/s", flush=True)
        print(f"ratios of rollout and training: {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
