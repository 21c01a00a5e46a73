"""The command `sage-lite`: demo, train, evaluate, doctor."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
from typing import Any, Sequence, Union, get_args, get_origin, get_type_hints

from sage_lite.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a UserError becomes one line on stderr and exit code 2."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args) or 0
    except UserError as error:
        print(f"sage-lite: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sage-lite", description="SAGE and its relatives, small enough to read.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | train | evaluate | doctor")

    demo = commands.add_parser("demo", help="train GRPO and SAGE on the embedded model and compare them")
    demo.add_argument("--out", default="runs/demo", help="folder of the results (default: %(default)s)")
    demo.add_argument(
        "--steps", type=_positive, default=300, help="training steps of each method (default: %(default)s)"
    )
    demo.add_argument(
        "--seeds", type=_positive, default=1, help="seeds to train and average over (default: %(default)s)"
    )
    demo.add_argument("--short", action="store_true", help="a few steps on a few problems, to see that all works")
    demo.set_defaults(run=_demo)

    train = commands.add_parser(
        "train", help="train a model on a task", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    _add_config_options(train)
    train.add_argument("--tau", type=float, help="temperature of SAGE, in units of reward (the method's own otherwise)")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser(
        "evaluate",
        help="pass@k of a model or a run's checkpoint",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    evaluate.add_argument("--model", help="folder or hub id; nothing for the embedded model")
    evaluate.add_argument("--task", default="countdown")
    evaluate.add_argument("--data", help="JSONL or Parquet file, or hub id; nothing for the task's own")
    evaluate.add_argument("--split", choices=("test", "train"), default="test")
    evaluate.add_argument("--rows", type=_positive, default=400, help="at most so many problems")
    evaluate.add_argument("--samples", type=_positive, default=16)
    evaluate.add_argument("--k", type=_positive, nargs="+", default=[1, 16])
    evaluate.add_argument("--max-new-tokens", type=_positive)
    evaluate.add_argument("--temperature", type=float, default=1.0)
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--four-bit", action="store_true")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    evaluate.set_defaults(run=_evaluate)

    doctor = commands.add_parser("doctor", help="what this machine can run; paste it into a bug report")
    doctor.set_defaults(run=_doctor)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    """One option a field of TrainConfig: the dataclass stays the only list of settings."""
    from sage_lite.trainer import TrainConfig

    hints = get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        option, kind, default = "--" + field.name.replace("_", "-"), hints[field.name], field.default
        if field.default_factory is not dataclasses.MISSING:  # the two dictionaries, as JSON
            parser.add_argument(option, type=json.loads, default={}, metavar="JSON")
        elif kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        else:
            union = get_origin(kind) in (Union, types.UnionType)
            parser.add_argument(option, type=get_args(kind)[0] if union else kind, default=default)


def _demo(args: argparse.Namespace) -> None:
    from sage_lite.demo import run_demo

    small: dict[str, Any] = {"steps": 3, "pool_size": 64, "test_rows": 32, "budget_rows": 8} if args.short else {}
    run_demo(args.out, **{"steps": args.steps, "seeds": args.seeds, **small})


def _train(args: argparse.Namespace) -> int:
    from sage_lite.trainer import TrainConfig, train

    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(TrainConfig)}
    values["out"] = values["out"] or f"runs/{args.task.replace(':', '-')}-{args.method}-seed{args.seed}"
    if args.tau is not None:
        values["advantage_params"] = {**values["advantage_params"], "tau": args.tau}
    result = train(TrainConfig(**values))
    if result.metrics:
        last = result.metrics[-1]
        print(
            f"step {last['step']}: reward {last['reward']:.3f}, pass rate {last['pass_rate']:.3f}, "
            f"dead groups {last['dead_groups']:.3f}"
        )
        if last["pass_rate"] == 0.0:
            print(
                "No rollout of the last step was right, and groups without a success teach nothing: "
                "try an easier task or a better start."
            )
    print(f"metrics: {result.out}/metrics.jsonl   checkpoints: {result.out}/checkpoints")
    if result.stopped_early:
        print("stopped early; the same command with --resume goes on")
    return 130 if result.stopped_early else 0


def _evaluate(args: argparse.Namespace) -> None:
    from sage_lite.evaluation import evaluate
    from sage_lite.policy import load_policy
    from sage_lite.tasks import load_task

    if max(args.k) > args.samples:
        raise UserError(f"--k {max(args.k)} needs --samples of at least that, got {args.samples}")
    task = load_task(args.task, args.data)
    rows = (task.test if args.split == "test" else task.train)[: args.rows]
    policy = load_policy(args.model, four_bit=args.four_bit)
    found = evaluate(
        policy, task, rows, samples=args.samples, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
        greedy=True, seed=args.seed,
    )  # fmt: skip
    scores = {f"pass@{k}": found.pass_at(k) for k in args.k}
    if args.json:
        numbers = {name: {"value": i.value, "interval": [i.low, i.high]} for name, i in scores.items()}
        print(json.dumps({"problems": len(rows), "greedy": float(found.greedy.mean()), **numbers}))
        return
    print(
        f"{policy.source} on {len(rows)} problems of {task.name}, {args.samples} samples each, "
        f"temperature {args.temperature:g}"
    )
    for name, interval in scores.items():
        print(f"  {name:<8} {interval}   (95 % bootstrap over problems)")
    print(f"  greedy   {found.greedy.mean():.3f}")


def _doctor(args: argparse.Namespace) -> None:
    from sage_lite.doctor import report

    print(report())


if __name__ == "__main__":
    sys.exit(main())
