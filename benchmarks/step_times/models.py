"""Models whose training step takes two threads of a CPU 50 ms to 1 s, each with a global batch and a loss.

`LOOKED_AT` served to find what calibration has to measure; nobody looked at `HELD_OUT` while that was done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, dict[str, Tensor]]
VOCABULARY, SEQUENCE, BATCH, IMAGE = 2048, 128, 8, 64


def _ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))


def _language(config: Any, model: Any) -> Made:
    torch.manual_seed(0)
    return model(config).train(), {"input_ids": _ids(), "labels": _ids()}


def _images(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(10, (batch,), generator=generator)}


class Regression(nn.Module):
    """A model with a squared error as its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


def mlp() -> Made:
    torch.manual_seed(0)
    layers = [nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 512)]
    return Regression(nn.Sequential(*layers)), {"x": torch.randn(512, 512), "y": torch.randn(512, 512)}


def gpt2() -> Made:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=256, n_layer=2, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _language(config, transformers.GPT2LMHeadModel)


def llama() -> Made:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return _language(config, transformers.LlamaForCausalLM)


def bert() -> Made:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    return _language(config, transformers.BertForMaskedLM)


def vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=3, num_attention_heads=3, image_size=IMAGE,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config).train(), _images(16)


def resnet() -> Made:
    config = transformers.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256], depths=[1, 2, 2], num_labels=10)
    torch.manual_seed(0)
    return transformers.ResNetForImageClassification(config).train(), _images(16)


class _Double(nn.Sequential):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Two levels, group norm, transposed convolutions on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bottom = _Double(3, 32), _Double(32, 64), _Double(64, 128)
        self.up_second, self.up_first = nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)
        self.back_second, self.back_first = _Double(128, 64), _Double(64, 32)
        self.last = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        up = self.up_second(self.bottom(F.max_pool2d(second, 2)))
        up = self.up_first(self.back_second(torch.cat([second, up], 1)))
        out: Tensor = self.last(self.back_first(torch.cat([first, up], 1)))
        return out


def unet() -> Made:
    torch.manual_seed(0)
    return Regression(UNet()), {"x": torch.randn(4, 3, IMAGE, IMAGE), "y": torch.randn(4, 3, IMAGE, IMAGE)}


def moe() -> Made:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return _language(config, transformers.MixtralForCausalLM)


def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=256, d_kv=64, d_ff=1024, num_layers=1, num_heads=4, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return _language(config, transformers.T5ForConditionalGeneration)


def gpt_neox() -> Made:
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=SEQUENCE, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False,
    )  # fmt: skip
    return _language(config, transformers.GPTNeoXForCausalLM)


def convnext() -> Made:
    config = transformers.ConvNextConfig(
        hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1], patch_size=2, image_size=IMAGE, num_labels=10
    )
    torch.manual_seed(0)
    return transformers.ConvNextForImageClassification(config).train(), _images(8)


class Tabular(nn.Module):
    """Embeddings of categories beside numbers, then a tower with batch norm and dropout-free leaky activations."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(4096, 64) for _ in range(8))
        self.tower = nn.Sequential(
            nn.Linear(8 * 64 + 32, 1024), nn.BatchNorm1d(1024), nn.LeakyReLU(), nn.Linear(1024, 1024), nn.Tanh(),
            nn.Linear(1024, 512), nn.ELU(), nn.Linear(512, 1),
        )  # fmt: skip

    def forward(self, numbers: Tensor, categories: Tensor, y: Tensor) -> Tensor:
        looked_up = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        out = self.tower(torch.cat([*looked_up, numbers], -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(out, y)


def tabular() -> Made:
    torch.manual_seed(0)
    inputs = {"numbers": torch.randn(1024, 32), "categories": torch.randint(4096, (1024, 8)), "y": torch.rand(1024)}
    return Tabular(), inputs


LOOKED_AT: Mapping[str, Callable[[], Made]] = {
    "mlp": mlp, "gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "resnet": resnet, "unet": unet, "moe": moe,
}  # fmt: skip
HELD_OUT: Mapping[str, Callable[[], Made]] = {
    "t5": t5, "gpt_neox": gpt_neox, "convnext": convnext, "tabular": tabular,
}  # fmt: skip
