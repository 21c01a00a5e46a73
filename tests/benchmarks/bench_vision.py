"""A training step on sampled labels: all of them drawn, against only the number of right ones, in turn, in one run.

    python tests/benchmarks/bench_vision.py [--rounds 10] [--rollouts 1024] [--batch-size 128] [--classes 1000]

Prints the time of the loss with its gradient in the logits, of the whole step of the digits experiment's network, and
the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from sage_lite import advantages, theory, vision
from sage_lite.vision_model import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--classes", type=int, default=1000)
    args = parser.parse_args()
    advantage = advantages.get("sage", tau=0.2)
    table = theory.binary_table(advantage, args.rollouts)
    model = build_model("small", args.classes, channels=1, height=8)
    images = torch.randn(args.batch_size, 1, 8, 24)
    labels = torch.randint(0, args.classes, (args.batch_size,))
    losses = {"sampled": lambda z: vision.sampled_label_loss(z, labels, args.rollouts, advantage),
              "conditional": lambda z: vision.conditional_label_loss(z, labels, args.rollouts, table),
              "expected": lambda z: vision.expected_label_loss(z, labels, args.rollouts, table),
              "cross-entropy": lambda z: torch.nn.functional.cross_entropy(z, labels)}
    logits = torch.randn(args.batch_size, args.classes, requires_grad=True)
    parts = {"loss and its gradient": lambda loss: loss(logits).backward(),
             "whole training step": lambda loss: loss(model(images).logits).backward()}
    print(f"{args.batch_size} images, {args.classes} classes, {args.rollouts} rollouts, "
          f"{torch.get_num_threads()} thread(s); CPU time of this process")
    for part, run in parts.items():
        seconds: dict[str, list[float]] = {name: [] for name in losses}
        for round_ in range(args.rounds + 1):  # the first is the warm-up
            for name, loss in losses.items():
                began = time.process_time()  # not slowed down by what else runs on the machine
                run(loss)
                if round_:
                    seconds[name].append(time.process_time() - began)
        print(part)
        for name, times in seconds.items():
            ratios = [a / b for a, b in zip(seconds["sampled"], times)]
            print(f"  {name:<14} {1e3 * statistics.median(times):8.2f} ms   "
                  f"sampled / this: median {statistics.median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]")


if __name__ == "__main__":
    main()
