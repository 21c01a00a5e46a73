"""The training phase: prompts shared and dead groups skipped against a whole row per rollout, in turn, in one run.

    python tests/benchmarks/bench_update.py [--rounds 5] [--groups 8] [--dead 2]

Groups have the shape of GSM8K's: prompt 150 tokens, completions 150, M = 8; `--dead` of them have equal rewards. Prints
the ratios and how far the gradients are apart.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from sage_lite import advantages
from sage_lite.policy import load_policy
from sage_lite.recipes import recipe
from sage_lite.rollout import Rollouts
from sage_lite.update import group_advantages, update

PROMPT, COMPLETION, GROUP = 150, 150, 8


class KeepGradient(torch.optim.SGD):
    def step(self, closure=None):
        pass


def make_batch(groups: int, dead: int) -> tuple[Rollouts, torch.Tensor]:
    """Random tokens, no two rollouts alike; the first `dead` groups fail as a whole."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 200, (groups, PROMPT), generator=generator).tolist()
    completions = torch.randint(10, 200, (groups * GROUP, COMPLETION), generator=generator)
    mask = torch.ones_like(completions, dtype=torch.bool)
    rewards = torch.zeros(groups, GROUP)
    rewards[dead:, : GROUP // 2] = 1.0
    return Rollouts(prompts, completions, mask, mask[:, 0], [""] * len(completions), GROUP), rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--dead", type=int, default=2)
    args = parser.parse_args()
    policy, method = load_policy(device="cpu"), recipe("sage")
    rollouts, rewards = make_batch(args.groups, args.dead)
    values = group_advantages(advantages.get(method.advantage, **method.advantage_params), rewards)
    optimizer = KeepGradient([p for _, p in policy.trainable()], lr=1.0)
    ways = {
        "plain": {"share_prompts": False, "skip_dead_groups": False},
        "prompts shared": {"share_prompts": True, "skip_dead_groups": False},
        "dead groups skipped": {"share_prompts": False, "skip_dead_groups": True},
        "both": {"share_prompts": True, "skip_dead_groups": True},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients = {}
    for round_ in range(args.rounds + 1):  # the first is the warm-up
        for name, way in ways.items():
            began = time.perf_counter()
            update(policy, optimizer, rollouts, rewards, values, method, grad_clip=0.0, **way)
            if round_:
                seconds[name].append(time.perf_counter() - began)
            gradients[name] = torch.cat([p.grad.flatten() for _, p in policy.trainable()]).clone()
    plain = gradients["plain"]
    print(f"{args.groups} groups of {GROUP}, {args.dead} dead, prompt {PROMPT}, completion {COMPLETION}")
    for name in ways:
        ratios = [a / b for a, b in zip(seconds["plain"], seconds[name])]
        gap = ((gradients[name] - plain).norm() / plain.norm()).item()
        print(
            f"{name:<20} {statistics.median(seconds[name]):.3f} s   "
            f"plain / this: median {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f}, {max(ratios):.2f}]   gradient off by {gap:.1e}"
        )


if __name__ == "__main__":
    main()
