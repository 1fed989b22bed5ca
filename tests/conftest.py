"""Every test: one thread per process, fixed seeds, nothing fetched from anywhere."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile

# Before the first import of a library that reads them; processes that tests start inherit them.
os.environ.update(
    {
        "AUTOPAR_CACHE_DIR": tempfile.mkdtemp(prefix="autopar-tests-"),  # what tests discover is not kept
        "OMP_NUM_THREADS": "1",  # xdist and gloo ranks share the cores: more threads only wait for one another
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
)

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
atexit.register(shutil.rmtree, os.environ["AUTOPAR_CACHE_DIR"], ignore_errors=True)

# Derandomized, so that a run can be repeated; no deadline, since the first example of a test also warms caches.
settings.register_profile("autopar", deadline=None, derandomize=True, database=None)
settings.load_profile("autopar")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """The same random numbers whichever tests ran before, in whichever process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the libraries under test read the legacy generator
    torch.manual_seed(0)
