"""A model of the transformers library by its configuration: `hf:gpt2`, `hf:llama:8x2048`, `hf:path/to/folder`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from autopar.errors import ModelSourceError

PREFIX = "hf:"
BATCH, SEQUENCE = 8, 128
_NAME = re.compile(r"hf:(?P<config>[^:]+)(:(?P<batch>[1-9]\d*)x(?P<sequence>[1-9]\d*))?")


def load_hugging_face(text: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A causal language model with random weights, and a batch of token ids that are labels too: its loss.

    The configuration is a local folder or file, else the library's default one of that model type, else one of the
    hub, which transformers fetches or has in its cache. Nothing else is fetched, and no code of the hub is run.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise ModelSourceError(
            f"{text!r} names no configuration", fix="write hf:CONFIG or hf:CONFIG:BATCHxSEQUENCE, as hf:gpt2:8x1024"
        )
    config = _config(match["config"])
    sizes = int(match["batch"] or BATCH), int(match["sequence"] or SEQUENCE)
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and sizes[1] > longest:
        raise ModelSourceError(
            f"{text}: the model has {longest} positions, fewer than {sizes[1]}", fix="write a shorter sequence"
        )
    model = _model(text, config)
    ids = (torch.arange(sizes[0] * sizes[1], device="cpu") * 7 % config.get_text_config().vocab_size).view(sizes)
    return model, {"input_ids": ids, "labels": ids.clone()}


def _config(name: str) -> Any:
    transformers = _transformers()
    if not Path(name).exists() and name in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(name)
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ModelSourceError(
            f"hf:{name}: no configuration: {why}",
            fix="give a folder that holds config.json, a model type of transformers as gpt2, or a name of the hub",
        ) from error


def _model(text: str, config: Any) -> torch.nn.Module:
    try:
        model: torch.nn.Module = _transformers().AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        raise ModelSourceError(
            f"{text}: transformers has no causal language model of type {config.model_type}",
            fix="write a factory that returns (model, example_inputs), and name it package.module:factory",
        ) from error
    return model


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelSourceError("hf: needs the transformers library", fix="pip install transformers") from error
    return transformers
