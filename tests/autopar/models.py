"""Tiny configurations of the models that the project promises, each with a batch of eight and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]
BATCH, SEQUENCE, VOCABULARY = 8, 16, 128


def _ids(low: int = 3, high: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(low, high, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))


def _transformer(config: Any, model: Any, **inputs: torch.Tensor) -> Made:
    torch.manual_seed(0)
    return model(config).train(), inputs


def gpt2() -> Made:
    """Vocabulary of 50,257, tied: it divides by no mesh."""
    config = transformers.GPT2Config(
        vocab_size=50_257, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _transformer(config, transformers.GPT2LMHeadModel, input_ids=_ids(high=50_257), labels=_ids(high=50_257))


def llama() -> Made:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return _transformer(config, transformers.LlamaForCausalLM, input_ids=_ids(), labels=_ids())


def bert() -> Made:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    )  # fmt: skip
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[::2, -3:] = 0
    return _transformer(config, transformers.BertForMaskedLM, input_ids=_ids(), attention_mask=mask, labels=_ids())


def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return _transformer(config, transformers.T5ForConditionalGeneration, input_ids=_ids(), labels=_ids())


def vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=8,
    )  # fmt: skip
    return _transformer(config, transformers.ViTForImageClassification, **_images())


def resnet() -> Made:
    """Bottleneck blocks with batch norm, as ResNet-50 has them."""
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 2], num_labels=8)
    return _transformer(config, transformers.ResNetForImageClassification, **_images())


def _images() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(8, (BATCH,), generator=generator)}


def mlp() -> Made:
    """No loss inside: the caller computes it from the output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    return model, (torch.randn(BATCH, 16),)


MODELS: Mapping[str, Callable[[], Made]] = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit, "resnet": resnet, "mlp": mlp,
}  # fmt: skip
