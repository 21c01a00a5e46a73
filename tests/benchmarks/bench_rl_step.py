"""One RL step of sage_lite against TRL's GRPOTrainer: same model, prompts, group size, tokens and dtype, in turn, in
one run.

    python tests/benchmarks/bench_rl_step.py [--rounds 3] [--steps 8]

Both sample 8 completions of 64 three-number Countdown prompts from the embedded model (float32, CPU), score them with
the same verifier and take one AdamW step with GRPO's advantage. The first two steps of every round are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sage_lite.data import data_path
from sage_lite.policy import load_policy
from sage_lite.rewards import countdown
from sage_lite.tasks import load_task
from sage_lite.trainer import TrainConfig, train

PROMPTS, GROUP, TOKENS, WARM_UP = 64, 8, 24, 2


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def trl_steps(steps: int, task) -> list[float]:
    rows = [{"prompt": [{"role": "user", "content": task.prompt(r, "short")}], **r} for r in task.train]

    def reward(completions, nums, target, **_):
        return [countdown(c[0]["content"], n, t) for c, n, t in zip(completions, nums, target)]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
            max_completion_length=TOKENS, learning_rate=2e-4, max_steps=steps, temperature=1.0, beta=0.0,
            use_cpu=True, bf16=False, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, seed=0,
        )  # fmt: skip
        policy, clock = load_policy(device="cpu"), Clock()
        trainer = GRPOTrainer(
            policy.model, reward, args=config, train_dataset=Dataset.from_list(rows), processing_class=policy.tokenizer,
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    return clock.seconds


def our_steps(steps: int, task) -> list[float]:
    config = TrainConfig(
        method="grpo",
        steps=steps,
        batch_size=PROMPTS,
        group_size=GROUP,
        max_new_tokens=TOKENS,
        lr=2e-4,
        device="cpu",
        progress=False,
    )
    return [line["seconds"] for line in train(config, task=task).metrics]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    task = load_task("countdown", pool_size=1024)
    print(f"model {data_path('tiny_qwen2').name}, {PROMPTS} x {GROUP} rollouts, {torch.get_num_threads()} threads")
    ratios = []
    for round_ in range(1, args.rounds + 1):
        theirs = statistics.median(trl_steps(args.steps, task)[WARM_UP:])
        ours = statistics.median(our_steps(args.steps, task)[WARM_UP:])
        ratios.append(theirs / ours)
        print(f"round {round_}: TRL {theirs:.3f} s a step, sage_lite {ours:.3f} s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"TRL / sage_lite: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
