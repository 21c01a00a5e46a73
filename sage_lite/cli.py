"""The command `sage-lite`: demo, train, evaluate, chat, export, doctor."""

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
    names = "demo | train | evaluate | chat | export | doctor"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)

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

    train = commands.add_parser("train", help="train a model on a task")
    train.add_argument("--preset", metavar="NAME", help="settings to start from, which every other option overrides")
    train.add_argument("--presets", action="store_true", help="list the presets, and stop")
    train.add_argument("--plan", action="store_true", help="say what the run would do and need, and stop")
    _add_config_options(train)
    train.add_argument("--tau", type=float, help="temperature of SAGE, in units of reward (the method's own otherwise)")
    train.set_defaults(run=_train)

    defaults = argparse.ArgumentDefaultsHelpFormatter
    about = "pass@k of a model, an adapter or a run's last checkpoint"
    evaluate = commands.add_parser("evaluate", help=about, formatter_class=defaults)
    _add_model_options(evaluate)
    evaluate.add_argument("--split", choices=("test", "train"), default="test")
    evaluate.add_argument("--rows", type=_positive, default=400, help="at most so many problems")
    evaluate.add_argument("--samples", type=_positive, default=16)
    evaluate.add_argument("--k", type=_positive, nargs="+", default=[1, 16])
    evaluate.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    evaluate.set_defaults(run=_evaluate)

    about = "sample and grade problems by row number or typed by hand"
    chat = commands.add_parser("chat", help=about, formatter_class=defaults)
    _add_model_options(chat)
    chat.add_argument("--prompt", action="append", help="ask this and stop, instead of reading lines; may be repeated")
    chat.add_argument("--samples", type=_positive, default=4)
    chat.set_defaults(run=_chat)

    about = "an adapter for PEFT, or the adapter merged into its base, from a run"
    export = commands.add_parser("export", help=about, formatter_class=defaults)
    source = export.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", dest="folder", metavar="FOLDER", help="a run: its last checkpoint is taken")
    source.add_argument("--adapter", dest="folder", metavar="FOLDER", help="an adapter's folder")
    export.add_argument("--out", required=True, help="a new folder")
    export.add_argument("--merge", action="store_true", help="one model in 16 bits instead of an adapter")
    about = "merge into the weights it was trained on, 4-bit ones unpacked, or into the original ones"
    export.add_argument("--base", choices=("trained", "original"), default="trained", help=about)
    export.add_argument("--model", help="the base model, where it is not at the place that the adapter names")
    export.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    export.set_defaults(run=_export)

    doctor = commands.add_parser("doctor", help="what this machine can run; paste it into a bug report")
    doctor.set_defaults(run=_doctor)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    """One option a field of TrainConfig: the dataclass stays the only list of settings.

    Only the options given are in the result, so that a preset stands where there is none.
    """
    from sage_lite.trainer import TrainConfig

    hints = get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        option, kind = "--" + field.name.replace("_", "-"), hints[field.name]
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"(default: {field.default})"}
        if field.default_factory is not dataclasses.MISSING:  # the two dictionaries, as JSON
            parser.add_argument(option, type=json.loads, metavar="JSON", **(common | {"help": "(default: {})"}))
        elif kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, **common)
        else:
            union = get_origin(kind) in (Union, types.UnionType)
            parser.add_argument(option, type=get_args(kind)[0] if union else kind, **common)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder of a model, an adapter or a run, or hub id; else the embedded model")
    parser.add_argument("--adapter", help="folder of an adapter, or of a run that trained one, to put on --model")
    parser.add_argument("--task", default="countdown")
    parser.add_argument("--data", help="JSONL or Parquet file, or hub id; nothing for the task's own")
    parser.add_argument("--task-options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--max-new-tokens", type=_positive, help="the task's own number otherwise")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--four-bit", action=argparse.BooleanOptionalAction, default=None,
                        help="otherwise as the adapter was trained")  # fmt: skip
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")


def _policy(args: argparse.Namespace):
    """The model that evaluate and chat are asked about, to sample from."""
    from pathlib import Path

    from sage_lite.export import find
    from sage_lite.policy import load_policy

    model = find(args.model) if args.model is not None and (Path(args.model) / "checkpoints").is_dir() else args.model
    adapter = None if args.adapter is None else find(args.adapter)
    if model is None and adapter is not None:
        model, adapter = adapter, None  # on the base that it names
    return load_policy(
        model, adapter=adapter, four_bit=args.four_bit, dtype=args.dtype, device=args.device, train=False
    )


def _demo(args: argparse.Namespace) -> None:
    from sage_lite.demo import run_demo

    small: dict[str, Any] = {"steps": 3, "pool_size": 64, "test_rows": 32, "budget_rows": 8} if args.short else {}
    run_demo(args.out, **{"steps": args.steps, "seeds": args.seeds, **small})


def _train(args: argparse.Namespace) -> int:
    from sage_lite import presets
    from sage_lite.trainer import TrainConfig, plan, train

    if args.presets:
        print(presets.table())
        return 0
    config = presets.configure(
        args.preset, {f.name: getattr(args, f.name) for f in dataclasses.fields(TrainConfig) if hasattr(args, f.name)}
    )
    config.out = config.out or f"runs/{config.task.replace(':', '-')}-{config.method}-seed{config.seed}"
    if args.tau is not None:
        config.advantage_params = {**config.advantage_params, "tau": args.tau}
    if args.plan:
        print(plan(config))
        return 0
    result = train(config, say=lambda text: print(text, flush=True))
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
    import numpy as np

    from sage_lite.evaluation import evaluate
    from sage_lite.tasks import load_task

    if max(args.k) > args.samples:
        raise UserError(f"--k {max(args.k)} needs --samples of at least that, got {args.samples}")
    # Data that is given to be evaluated is evaluated whole; only a task's own data is split here.
    options = {"split": args.split} if args.data else {}
    task = load_task(args.task, args.data, **options | args.task_options)
    rows = (task.test if args.split == "test" else task.train)[: args.rows]
    policy = _policy(args)
    found = evaluate(
        policy, task, rows, samples=args.samples, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
        top_p=args.top_p, greedy=True, seed=args.seed,
    )  # fmt: skip
    scores = {f"pass@{k}": found.pass_at(k) for k in args.k}
    if args.json:
        numbers = {name: {"value": i.value, "interval": i.bounds} for name, i in scores.items()}
        print(json.dumps({"problems": len(rows), "greedy": float(np.nanmean(found.greedy)), **numbers}))
        return
    print(
        f"{policy.source} on {len(rows)} problems of {task.name}, {args.samples} samples each, "
        f"temperature {args.temperature:g}"
    )
    for name, interval in scores.items():
        print(f"  {name:<8} {interval}   (95 % bootstrap over problems)")
    print(f"  greedy   {np.nanmean(found.greedy):.3f}")


def _chat(args: argparse.Namespace) -> None:
    from sage_lite import chat
    from sage_lite.tasks import load_task

    task = load_task(args.task, args.data, **args.task_options)
    policy = _policy(args)
    settings = {"samples": args.samples, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature,
                "top_p": args.top_p}  # fmt: skip
    if args.prompt:
        for text in args.prompt:
            print(chat.ask(policy, task, text, seed=args.seed, **settings))
    else:
        chat.talk(policy, task, (line.rstrip("\n") for line in sys.stdin), seed=args.seed, **settings)


def _export(args: argparse.Namespace) -> None:
    from sage_lite import export
    from sage_lite.loading import adapter_config

    folder = export.find(args.folder)
    if adapter_config(folder) is None:
        if args.merge:
            raise UserError(f"{folder} holds no adapter to merge: without --merge its weights are saved in 16 bits")
        print(f"all weights, in {args.dtype}: {export.export_weights(folder, args.out, args.dtype)}")
    elif args.merge:
        print(export.merge(folder, args.out, model=args.model, base=args.base, dtype=args.dtype))
    else:
        print(f"adapter: {export.export_adapter(folder, args.out)}")


def _doctor(args: argparse.Namespace) -> None:
    from sage_lite.doctor import report

    print(report())


if __name__ == "__main__":
    sys.exit(main())
