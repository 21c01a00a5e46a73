"""Settings shared by all tests: nothing reaches for the network, and hypothesis does not judge speed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Set before any test imports transformers or datasets, which read them once; notebooks' kernels inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A busy two-core machine is slow at random; examples are the same in every CI run.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root folder."""
    return REPOSITORY
