"""Models in plain PyTorch, of the kinds that people write: what each computes is its point, so none is a good model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from autopar.zoo.plain.computed import Made
from autopar.zoo.plain.images import (
    conv_net,
    diffusion_transformer,
    fourier_operator,
    neighbours,
    spatial_transformer,
    unet,
    upscaler,
    video_net,
    wavenet,
)
from autopar.zoo.plain.others import (
    adapters,
    autoencoder,
    contrastive,
    gaussian_process,
    graph_net,
    mixed_ops,
    per_sample_gradients,
    quantized,
    recommender,
    sparse_coder,
)
from autopar.zoo.plain.sequences import (
    byte_mixer,
    crf,
    dense_experts,
    dropout_transformer,
    einsum_attention,
    gru_forecaster,
    lstm_tagger,
    masked_attention,
    recognizer,
    selective_scan,
    translator,
)

PLAIN: Mapping[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        conv_net, unet, upscaler, wavenet, video_net, lstm_tagger, gru_forecaster, graph_net, diffusion_transformer,
        recommender, einsum_attention, masked_attention, dropout_transformer, translator, mixed_ops, fourier_operator,
        per_sample_gradients, quantized, sparse_coder, autoencoder, contrastive, gaussian_process, crf, recognizer,
        spatial_transformer, selective_scan, dense_experts, adapters, neighbours, byte_mixer,
    )
}  # fmt: skip


def make_plain(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of `PLAIN` in training mode, with the same weights every time, and its inputs."""
    torch.manual_seed(0)
    model, inputs = PLAIN[name]()
    return model.train(), inputs
