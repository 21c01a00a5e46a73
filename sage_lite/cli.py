"""The command `sage-lite`: demo, train, evaluate, chat, export, doctor."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from typing import Any, Sequence

from sage_lite.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a UserError becomes one line on stderr and exit code 2, Ctrl-C one and 130.

    Where nobody reads on, as in `sage-lite ... | head -1`, it ends without a word, as other programs do.
    """
    try:
        try:
            args = _parser().parse_args(arguments)
            return args.run(args) or 0
        finally:
            sys.stdout.flush()
    except UserError as error:
        print(f"sage-lite: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"sage-lite: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries once more at its end
        return 141


def _parser() -> argparse.ArgumentParser:
    from sage_lite import options, presets

    positive, default = options.positive, "(default: %(default)s)"
    parser = argparse.ArgumentParser(prog="sage-lite", description="SAGE and its relatives, small enough to read.")
    names = "demo | train | evaluate | chat | export | doctor"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)

    demo = commands.add_parser("demo", help="train GRPO and SAGE on the embedded model and compare them")
    demo.add_argument("--out", default="runs/demo", help=f"folder of the results {default}")
    demo.add_argument("--steps", type=positive, help="training steps of each method (default: 300; 3 with --short)")
    demo.add_argument("--seeds", type=positive, default=1, help=f"seeds to train and average over {default}")
    demo.add_argument("--short", action="store_true", help="a few steps on a few problems, to see that all works")
    demo.set_defaults(run=_demo)

    train = commands.add_parser("train", help="train a model on a task")
    about = f"settings to start from, which every other option overrides; {', '.join(presets.PRESETS)}"
    train.add_argument("--preset", metavar="NAME", help=about)
    train.add_argument("--presets", action="store_true", help="list the presets, and stop")
    train.add_argument("--plan", action="store_true", help="say what the run would do and need, and stop")
    options.add_config_options(train)
    train.add_argument("--tau", type=float, help="temperature of SAGE, in units of reward (the method's own otherwise)")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="pass@k of a model, an adapter or a run's last checkpoint")
    options.add_model_options(evaluate)
    evaluate.add_argument("--split", choices=("test", "train"), default="test", help=f"which problems {default}")
    about = "take all rows of the data as problems, also those that the run was trained on"
    evaluate.add_argument("--all-rows", action="store_true", help=about)
    evaluate.add_argument("--rows", type=positive, default=400, help=f"at most so many problems {default}")
    evaluate.add_argument("--samples", type=positive, default=16, help=f"completions of each problem {default}")
    evaluate.add_argument("--k", type=positive, nargs="+", help="the k of pass@k (default: 1 and --samples)")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    evaluate.set_defaults(run=_evaluate)

    chat = commands.add_parser("chat", help="sample and grade problems by row number or typed by hand")
    options.add_model_options(chat)
    chat.add_argument("--prompt", action="append", help="ask this and stop, instead of reading lines; may be repeated")
    chat.add_argument("--samples", type=positive, default=4, help=f"completions of each problem {default}")
    chat.set_defaults(run=_chat)

    about = "an adapter for PEFT, or the adapter merged into its base, from a run"
    export = commands.add_parser("export", help=about)
    source = export.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", dest="folder", metavar="FOLDER", help="a run: its last checkpoint is taken")
    source.add_argument("--adapter", dest="folder", metavar="FOLDER", help="an adapter's folder")
    export.add_argument("--out", required=True, help="a new folder")
    export.add_argument("--merge", action="store_true", help="one model in 16 bits instead of an adapter")
    about = "merge into the weights it was trained on, 4-bit ones unpacked, or into the original ones"
    export.add_argument("--base", choices=("trained", "original"), default="trained", help=f"{about} {default}")
    export.add_argument("--model", help="the base model, where it is not at the place that the adapter names")
    export.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help=f"of weights {default}")
    export.set_defaults(run=_export)

    doctor = commands.add_parser("doctor", help="what this machine can run; paste it into a bug report")
    doctor.set_defaults(run=_doctor)
    return parser


def _policy(args: argparse.Namespace):
    """The model that evaluate and chat are asked about, to sample from."""
    from sage_lite.device import pick_device
    from sage_lite.folders import find
    from sage_lite.policy import load_policy

    model, adapter = args.model, None if args.adapter is None else find(args.adapter)
    if model is None and adapter is not None:
        model, adapter = adapter, None  # on the base that it names
    device = pick_device(args.device)
    return load_policy(model, adapter=adapter, four_bit=args.four_bit, dtype=args.dtype, device=device, train=False)


def _demo(args: argparse.Namespace) -> None:
    from sage_lite.demo import run_demo

    small: dict[str, Any] = {"pool_size": 64, "test_rows": 32, "budget_rows": 8} if args.short else {}
    run_demo(args.out, steps=args.steps or (3 if args.short else 300), seeds=args.seeds, **small)


def _train(args: argparse.Namespace) -> int:
    from sage_lite import presets
    from sage_lite.recipes import recipe
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
        # Rewards below 1 that differ teach; and Sign, alone of all, learns from groups whose rollouts are all wrong.
        if last["pass_rate"] == 0.0 and last["dead_groups"] == 1.0 and recipe(config.method).advantage != "sign":
            print(
                "No rollout of the last step was right, and groups of equal rewards teach nothing: "
                "try an easier task or a better start."
            )
    print(f"metrics: {result.out}/metrics.jsonl   checkpoints: {result.out}/checkpoints")
    if result.stopped_early:
        print("stopped early; the same command with --resume goes on")
    tokens = [] if config.max_new_tokens is None else ["--max-new-tokens", str(config.max_new_tokens)]
    device = [] if config.device is None else ["--device", config.device]
    print("evaluate: " + shlex.join(["sage-lite", "evaluate", "--model", str(result.out), *tokens, *device]))
    return 130 if result.stopped_early else 0


def _evaluate(args: argparse.Namespace) -> None:
    import numpy as np

    from sage_lite import problems
    from sage_lite.evaluation import evaluate

    ks = args.k or sorted({1, args.samples})
    if max(ks) > args.samples:
        raise UserError(f"--k {max(ks)} needs --samples of at least that, got {args.samples}")
    run = problems.run_of(args.adapter) or problems.run_of(args.model)
    task, which = problems.load(run, args.task, args.data, args.task_options, part=args.split, all_rows=args.all_rows)
    known = task.test if args.split == "test" else task.train
    rows = known[: args.rows]
    policy = _policy(args)
    found = evaluate(
        policy, task, rows, samples=args.samples, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
        top_p=args.top_p, greedy=True, seed=args.seed,
    )  # fmt: skip
    scores = {f"pass@{k}": found.pass_at(k) for k in ks}
    rewards = {"reward": found.mean_reward(), "greedy_reward": found.mean_greedy_reward()} if found.graded else {}
    greedy = float(np.nanmean(found.greedy))
    if args.json:
        about = {"problems": len(rows), "task": task.name, "source": task.source, "which": which, "greedy": greedy}
        numbers = {n: {"value": i.value, "interval": i.bounds} for n, i in (scores | rewards).items()}
        print(json.dumps(about | numbers))
        return
    print(
        f"{policy.source} on {len(rows)} problems of {task.name}, {args.samples} samples each, "
        f"temperature {args.temperature:g}"
    )
    print(f"  problems: {task.source}; {which}" + (f", the first of {len(known)}" if len(rows) < len(known) else ""))
    for name, interval in (scores | rewards).items():
        print(f"  {name.replace('_', ' '):<8} {interval}   (95 % bootstrap over problems)")
    print(f"  greedy   {greedy:.3f}")


def _chat(args: argparse.Namespace) -> None:
    from sage_lite import chat, problems

    run = problems.run_of(args.adapter) or problems.run_of(args.model)
    task, _ = problems.load(run, args.task, args.data, args.task_options)
    policy = _policy(args)
    settings = {"samples": args.samples, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature,
                "top_p": args.top_p}  # fmt: skip
    print(f"task: {task.name}; problems: {task.source}")
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
