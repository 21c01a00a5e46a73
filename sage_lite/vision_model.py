"""ResNets for the classifier experiment: transformers' ResNetForImageClassification, randomly initialised."""

from __future__ import annotations

import torch

from sage_lite.errors import UserError

MODELS = {  # name: arguments of ResNetConfig
    "tiny": {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "layer_type": "basic"},
    "small": {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [1, 1, 1], "layer_type": "basic"},
    "medium": {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 1, 1], "layer_type": "basic"},
    "resnet18": {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"},
    "resnet50": {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "layer_type": "bottleneck"},
}
FINE = 32  # images less high than this lose only half of their resolution in the stem


def build_model(name: str, classes: int, *, channels: int = 3, height: int = 224, seed: int = 0) -> torch.nn.Module:
    """The model called `name` for images [N, channels, height, …], with weights drawn from `seed`.

    The stem of a ResNet divides the resolution by four, which leaves little of 8 pixels: below FINE pixels of `height`
    its pooling is left out. Raises UserError for an unknown name. The global random state is left alone.
    """
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    from transformers import ResNetConfig, ResNetForImageClassification

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = ResNetConfig(num_channels=channels, num_labels=classes, **MODELS[name])
        model = ResNetForImageClassification(config)
    if height < FINE:
        model.resnet.embedder.pooler = torch.nn.Identity()
    return model
