"""The classifier's training loop on sampled labels, its settings and presets; its command is `vision_train`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sage_lite import advantages, checkpoint, theory, vision
from sage_lite.config import batch_indices
from sage_lite.device import best_dtype, fixed_order, pick_device
from sage_lite.errors import UserError
from sage_lite.folders import run_folder
from sage_lite.resume import prepare_folder, stop_on_interrupt
from sage_lite.runlog import MetricsFile, read_lines
from sage_lite.vision_data import ImageSet, load_images, random_crop
from sage_lite.vision_model import MODELS, build_model

PASS_K = 128
PARAMETERS: dict[str, dict[str, Any]] = {"sage": {"tau": 0.2}}  # the paper's, for this experiment
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {},
    # The paper's experiment: ResNet-50 from scratch, 20 epochs of SGD with 1,024 sampled labels an image.
    "imagenet": {"data": "ILSVRC/imagenet-1k", "model": "resnet50", "size": 224, "epochs": 20, "batch_size": 256,
                 "lr": 0.1, "warmup": 0.05, "schedule": "cosine", "crop": 0.08, "eval_every": 1000},
    # A check that fits a laptop: a few hundred or thousand images of 64 pixels (give --data), learnt by heart.
    "imagenet64": {"model": "tiny", "size": 64, "epochs": 30, "batch_size": 100, "eval_every": 50},
}


@dataclass
class VisionConfig:
    """All of a run. The defaults are the offline experiment: 1,000 classes made of digits, a small ResNet.

    method: "cross_entropy" or an advantage's name; advantage_params: its parameters, over PARAMETERS (SAGE's tau is 0.2
    here). rollouts: sampled labels an image.
    estimator: "conditional", "sampled" or "expected" (`sage_lite.vision`). match_size: rescale each batch's loss so
    that its expected gradient in the logits is as long as cross-entropy's; only the weighting of images is left.
    data, digits, classes, limit, size: as in `vision_data.load_images`. crop: smallest share of the area that
    `random_crop` keeps, None for no augmentation. steps: None takes `epochs`. warmup: share of the steps.
    lr, momentum, weight_decay: SGD's. amp: automatic mixed precision, on a GPU only. eval_every: steps, 0 for only at
    the end. out: folder of the run, None leaves no file. resume: go on from its last checkpoint.
    """

    method: str = "sage"
    advantage_params: dict[str, Any] = field(default_factory=dict)
    rollouts: int = 1024
    estimator: str = "conditional"
    match_size: bool = False
    data: str = "digits"
    digits: int = 3
    classes: int | None = None
    limit: int | None = None
    size: int = 224
    crop: float | None = None
    model: str = "small"
    steps: int | None = None
    epochs: float = 2.4
    batch_size: int = 64
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup: float = 0.0
    schedule: str = "constant"
    amp: bool = True
    device: str | None = None
    seed: int = 0
    eval_every: int = 0
    out: str | None = None
    resume: bool = False
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    progress: bool = False


@dataclass
class VisionResult:
    """What a run leaves in memory: the model, one dict of metrics a step, and whether Ctrl-C ended it early."""

    model: torch.nn.Module
    metrics: list[dict[str, Any]]
    seconds: float
    stopped_early: bool


def train(config: VisionConfig, data: tuple[ImageSet, ImageSet | None] | None = None) -> VisionResult:
    """Run `config`; `data`, training and test images, is used instead of loading when given.

    Every step draws its batch, its crops and its labels from generators seeded with (seed, step), so that a resumed run
    is the run that was never stopped, and two methods see the same images. Raises UserError for settings that make no
    sense before the first step, and when the logits stop being finite.
    """
    advantage = check(config)
    with run_folder(config.out, config.resume) as out:
        return _train(config, advantage, data or load_data(config), out)


def _train(config: VisionConfig, advantage: Any, data: tuple[ImageSet, ImageSet | None],
           out: Path | None) -> VisionResult:
    device = pick_device(config.device)
    images, test = data[0], data[1] or data[0]
    if config.steps is None:
        config = dataclasses.replace(config, steps=max(1, round(config.epochs * len(images) / config.batch_size)))
    height, width = (images.size, images.size) if images.pixels is None else images.pixels.shape[2:]
    if config.crop and config.size > min(height, width):
        raise UserError(f"cannot crop images of {height} x {width} pixels to size {config.size}: lower size, or leave "
                        "crop out")
    model = build_model(config.model, len(images.classes), channels=images.channels, height=height, seed=config.seed)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum,
                                weight_decay=config.weight_decay)
    half = best_dtype(device) if config.amp and device.type == "cuda" else torch.float32
    scaler = torch.amp.GradScaler("cuda", enabled=half is torch.float16)
    saved = _Saved(model)
    first = prepare_folder(config, out, saved, optimizer)
    if first:
        scaler.load_state_dict(checkpoint.last_state(out / "checkpoints")["scaler"])
    mean, std = (value.to(device) for value in _scale(images))
    if first >= config.steps:
        raise UserError(f"{out} is at step {first} already: give more than {config.steps} steps to go on with it")
    stopped, started = False, time.perf_counter()
    with MetricsFile(out, first) as log, stop_on_interrupt() as interrupted, fixed_order(device):
        history = read_lines(log.path) if first else []
        for step, pixels, labels in _batches(images, config, first):
            generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
            pixels = (pixels.to(device).float() - mean) / std
            if config.crop:
                pixels = random_crop(pixels, config.size, smallest=config.crop, generator=generator)
            labels = labels.to(device)
            rate = config.lr * schedule(config, step - 1)
            for group in optimizer.param_groups:
                group["lr"] = rate
            model.train()
            with torch.autocast(device.type, half, enabled=half is not torch.float32):
                logits = model(pixels).logits
            draws = generator if device.type == "cpu" else torch.Generator(device).manual_seed(generator.initial_seed())
            loss = _loss(config, advantage, logits, labels, draws)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            line = {"step": step, "lr": rate, **_numbers(logits, labels)}
            if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                line |= evaluate(model, test, mean, std, config.size if config.crop else None)
            history.append(log.write(line))
            last = step == config.steps or interrupted.is_set()  # asked once: the save and the stop go together
            if config.progress and (last or step % 10 == 0):
                print(f"{config.method} step {step}/{config.steps}: pass rate {line['pass_rate']:.4f}", flush=True)
            if out is not None and (last or step % config.checkpoint_every == 0):
                state = {"scaler": scaler.state_dict()}
                checkpoint.save_checkpoint(out / "checkpoints", step, saved, optimizer, state, config.keep_checkpoints)
            if last and step < config.steps:
                stopped = True
                break
    return VisionResult(model, history, time.perf_counter() - started, stopped)


def load_data(config: VisionConfig) -> tuple[ImageSet, ImageSet | None]:
    """Training and test images of a run; those to be cropped are decoded a seventh larger (256 pixels for 224)."""
    size = config.size + config.size // 7 if config.crop else config.size
    return load_images(config.data, size=size, digits=config.digits, classes=config.classes, limit=config.limit)


@torch.no_grad()
def evaluate(model: torch.nn.Module, images: ImageSet, mean: torch.Tensor, std: torch.Tensor, size: int | None = None,
             batch_size: int = 500) -> dict[str, float]:
    """Top-1 accuracy, mean -log p, and exact pass@1 (mean p) and pass@128 over `images`, as "test_…".

    mean, std: [C, 1, 1], the scale of the pixels that the model was trained on. size: only this middle square is shown.
    """
    model.eval()
    right, odds = [], []
    for start in range(0, len(images), batch_size):
        index = range(start, min(start + batch_size, len(images)))
        pixels = (images.batch(index).to(mean.device).float() - mean) / std
        if size is not None:
            top, left = ((side - size) // 2 for side in pixels.shape[-2:])
            pixels = pixels[..., top:top + size, left:left + size]
        logits, labels = model(pixels).logits, images.labels[index.start:index.stop].to(mean.device)
        right.append(logits.argmax(-1) == labels)
        odds.append(vision.log_odds(logits, labels).double())
    odds = torch.cat(odds)
    return {"test_top1": torch.cat(right).double().mean().item(), "test_loss": -F.logsigmoid(odds).mean().item(),
            "test_pass@1": vision.pass_at(odds, 1).mean().item(),
            f"test_pass@{PASS_K}": vision.pass_at(odds, PASS_K).mean().item()}


def schedule(config: VisionConfig, step: int) -> float:
    """Share of the peak learning rate at `step` (from 0): a linear warm-up, then constant or half a cosine."""
    warm = round(config.warmup * config.steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    if config.schedule == "constant":
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm) / (config.steps - warm)))


def _batches(images: ImageSet, config: VisionConfig, first: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(step, pixels, labels) of each step after `first`; the next batch is decoded while this one is trained on."""
    def load(step: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        index = batch_indices(len(images), config.batch_size, step - 1, config.seed)
        return step, images.batch(index), images.labels[index]

    with ThreadPoolExecutor(1) as pool:
        ahead = None
        for step in range(first + 1, config.steps + 1):
            batch = load(step) if ahead is None else ahead.result()
            ahead = pool.submit(load, step + 1) if step < config.steps else None
            yield batch


def _loss(config: VisionConfig, advantage: Any, logits: torch.Tensor, labels: torch.Tensor,
          generator: torch.Generator) -> torch.Tensor:
    if advantage is None:
        return F.cross_entropy(logits.float(), labels)
    loss = vision.LOSSES[config.estimator](logits, labels, config.rollouts, advantage, generator=generator)
    return loss * _match(config, advantage, logits.detach(), labels) if config.match_size else loss


def _match(config: VisionConfig, advantage: Any, logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Length of cross-entropy's gradient in the logits over that of the method's expected one."""
    probs = logits.double().softmax(-1)
    lengths = (probs - F.one_hot(labels, probs.shape[-1])).square().sum(-1)  # squared, of each image
    pass_rate = torch.sigmoid(vision.log_odds(logits.double(), labels)).cpu().numpy()
    speed = torch.as_tensor(vision.relative_speed(advantage, pass_rate, config.rollouts)).to(lengths)
    return float((lengths.sum() / (speed.square() * lengths).sum().clamp(min=1e-24)).sqrt())


@torch.no_grad()
def _numbers(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Of the training batch, before the update: mean p, mean log p and accuracy."""
    odds = vision.log_odds(logits, labels)
    right = (logits.argmax(-1) == labels).float().mean()
    values = torch.stack([torch.sigmoid(odds).mean(), F.logsigmoid(odds).mean(), right]).tolist()
    return dict(zip(("pass_rate", "log_pass", "top1"), values))


def _scale(images: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel, [C, 1, 1], from up to 1,000 training images spread over the set."""
    some = images.batch(range(0, len(images), max(1, len(images) // 1000))).double()
    return some.mean((0, 2, 3))[:, None, None].float(), some.std((0, 2, 3))[:, None, None].clamp(min=1.0).float()


def check(config: VisionConfig) -> Any:
    """The method's advantage: None for cross-entropy, else its table, or the function where labels are sampled.

    Raises UserError for settings that make no sense.
    """
    least = {"batch_size": 2, "checkpoint_every": 1, "keep_checkpoints": 1, "steps": 1, "eval_every": 0, "seed": 0}
    for name, low in least.items():  # batch normalisation needs two images
        if (value := getattr(config, name)) is not None and not low <= value < 2**31:
            raise UserError(f"{name} must be a whole number of at least {low}, got {value}")
    if config.schedule not in ("constant", "cosine"):
        raise UserError(f"unknown schedule {config.schedule!r}; choose constant or cosine")
    if config.estimator not in vision.LOSSES:
        raise UserError(f"unknown estimator {config.estimator!r}; choose one of {', '.join(vision.LOSSES)}")
    if not (config.lr > 0 and 0 < config.momentum < 1 and 0 <= config.warmup < 1 and config.epochs > 0):
        raise UserError("lr and epochs must be > 0, momentum in (0, 1) and warmup in [0, 1), got "
                        f"{config.lr}, {config.epochs}, {config.momentum} and {config.warmup}")
    if not config.weight_decay >= 0:
        raise UserError(f"weight_decay must be >= 0, got {config.weight_decay}")
    if config.model not in MODELS:
        raise UserError(f"unknown model {config.model!r}; choose one of {', '.join(MODELS)}")
    if config.resume and config.out is None:
        raise UserError("resume needs out, the folder of the run to go on with")
    if config.method == "cross_entropy":
        return None
    parameters = {**PARAMETERS.get(config.method, {}), **config.advantage_params}
    advantage = advantages.get(config.method, **parameters)
    table = theory.binary_table(advantage, config.rollouts)
    if not np.any(np.concatenate(table)):
        raise UserError(f"{config.method} compares the rollouts of a group: rollouts must be > {config.rollouts}")
    return advantage if config.estimator == "sampled" else table


class _Saved:
    """What `sage_lite.checkpoint` asks of a policy, for a plain model."""

    is_adapter = False

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def trainable(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.model.named_parameters()

