"""Remake data/tiny_qwen2: a Qwen2.5-architecture model of one million weights, warm-started on Countdown.

    python data/make_tiny_qwen2.py [--out DIR] [--steps N] [--seed S]

It reads bytes, so a digit is a token. It is shown three-number problems, and after each either a right expression or a
random one, so that it knows the format and is right now and then: a start that reinforcement learning can improve. The
held-out test problems are never shown. Four minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sage_lite.countdown import random_expression, solutions
from sage_lite.evaluation import pass_at_k
from sage_lite.logprobs import completion_logprobs
from sage_lite.policy import Policy
from sage_lite.rollout import sample
from sage_lite.tasks import load_task

SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>"]
# Every message is <|role|>text<|im_end|>; one token a role keeps the prompts of a character model short.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
RIGHT_SHARE = 0.75
PROMPTS, ANSWERS, LEARNING_RATE = 128, 2, 2e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen2's byte-level tokenizer with an empty merge table: one token a byte, so a character is a token."""
    vocab = {token: i for i, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[2:], chat_template=CHAT_TEMPLATE, padding_side="left", model_max_length=2048,
        clean_up_tokenization_spaces=False, prompt_style="short",
    )  # fmt: skip


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, rope_theta=10_000.0,
            tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip


def warm_start_loss(rows: list[dict], rng: random.Random, task, policy: Policy) -> torch.Tensor:
    """Mean negative log-likelihood of the tokens of right and random expressions, ANSWERS to each of PROMPTS
    problems."""
    messages, answers = [], []
    for row in rng.choices(rows, k=PROMPTS):
        nums, right = rng.sample(row["nums"], len(row["nums"])), solutions(row["nums"], row["target"])
        messages.append(task.prompt({**row, "nums": nums}, "short"))
        answers += [
            rng.choice(right) if rng.random() < RIGHT_SHARE else random_expression(nums, rng) for _ in range(ANSWERS)
        ]
    ids = [x + policy.eos_ids[:1] for x in policy.tokenizer(answers, add_special_tokens=False)["input_ids"]]
    width = max(map(len, ids))
    tokens = torch.tensor([x + [policy.pad_id] * (width - len(x)) for x in ids])
    mask = torch.arange(width) < torch.tensor([[len(x)] for x in ids])
    group = torch.arange(len(ids)) // ANSWERS
    logprobs = completion_logprobs(policy.model, policy.encode(messages), tokens, mask, group, pad_id=policy.pad_id)
    return -logprobs.sum() / mask.sum()


def measure(policy: Policy, task, rollouts: int = 16, rows: int = 400) -> dict[str, float]:
    prompts = policy.encode([task.prompt(row, "short") for row in task.test[:rows]])
    out = sample(policy, prompts, rollouts, max_new_tokens=24, generator=torch.Generator().manual_seed(1))
    right = torch.tensor([task.score(t, task.test[i // rollouts]) for i, t in enumerate(out.texts)]).view(-1, rollouts)
    counts = right.sum(-1).long().tolist()
    return {f"pass@{k}": sum(pass_at_k(rollouts, c, k) for c in counts) / len(counts) for k in (1, 16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny_qwen2")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    policy = Policy(model, tokenizer, "new", eos_ids=[tokenizer.eos_token_id])
    task = load_task("countdown")
    print(
        f"{sum(p.numel() for p in model.parameters()):,} weights, {len(task.train)} problems, {len(task.test)} held out"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=args.steps, pct_start=0.1)
    start = time.time()
    for step in range(1, args.steps + 1):
        loss = warm_start_loss(task.train, rng, task, policy)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == args.steps:
            print(
                f"step {step}: loss {loss.item():.3f}, {measure(policy, task)}, {time.time() - start:.0f} s", flush=True
            )
    model.eval().save_pretrained(args.out, safe_serialization=True)
    tokenizer.save_pretrained(args.out)
    # Names that both transformers 4 and 5 read.
    file = args.out / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("extra_special_tokens", None)
    config |= {
        "tokenizer_class": "Qwen2Tokenizer",
        "additional_special_tokens": SPECIAL[2:],
        "chat_template": CHAT_TEMPLATE,
    }
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
