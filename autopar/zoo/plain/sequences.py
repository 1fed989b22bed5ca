"""Sequences: recurrences, attention written and fused, scans, structured losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.zoo.plain.computed import BATCH, Computed, Made, below, normal, weight


def lstm_tagger() -> Made:
    """Two bidirectional LSTM layers over embeddings, cross-entropy with ignored labels."""

    def compute(self: Any, tokens: Tensor, labels: Tensor) -> Any:
        hidden, _ = self.lstm(self.embed(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=0, label_smoothing=0.1)

    lstm = nn.LSTM(16, 16, num_layers=2, bidirectional=True, batch_first=True)
    model = Computed(compute, embed=nn.Embedding(40, 16, padding_idx=0), lstm=lstm, head=nn.Linear(32, 12))
    return model, (below(40, BATCH, 6), below(12, BATCH, 6, seed=1))


def gru_forecaster() -> Made:
    """A GRU that feeds itself."""

    def compute(self: Any, x: Tensor) -> Any:
        _, state = self.gru(x)
        step, outputs = x[:, -1], []
        for _ in range(3):
            hidden, state = self.gru(step.unsqueeze(1), state)
            step = self.head(hidden.squeeze(1))
            outputs.append(step)
        return torch.stack(outputs, 1)

    return Computed(compute, gru=nn.GRU(4, 16, batch_first=True), head=nn.Linear(16, 4)), (normal(BATCH, 6, 4),)


def einsum_attention() -> Made:
    """Attention in einsum, with rotary positions and a causal mask by hand."""

    def compute(self: Any, x: Tensor) -> Any:
        q, k, v = torch.einsum("btd,sdhe->sbthe", x, self.qkv)
        angle = torch.outer(torch.arange(x.shape[1]).float(), 1e4 ** (-torch.arange(0, 8, 2) / 8))
        q, k = (_rotated(item, angle) for item in (q, k))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(8)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(~allowed, -math.inf).softmax(-1), v)
        return torch.einsum("bqhe,hed->bqd", mixed, self.out)

    return Computed(compute, qkv=weight(3, 32, 4, 8), out=weight(4, 8, 32)), (normal(BATCH, 6, 32),)


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * turn).flatten(-2)


def masked_attention() -> Made:
    """Fused attention with a causal flag, a bool mask, an added mask that is trained, and grouped heads."""

    def compute(self: Any, x: Tensor, keep: Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        padded = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])
        biased = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, scale=0.3)
        grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        return self.out(torch.cat([causal, padded, biased, grouped], -1).transpose(1, 2).flatten(2))

    keep = torch.arange(6) < (torch.arange(BATCH)[:, None] % 4 + 3)
    model = Computed(compute, qkv=nn.Linear(32, 96), out=nn.Linear(128, 16), bias=weight(1, 4, 6, 6))
    return model, (normal(BATCH, 6, 32), keep)


def dropout_transformer() -> Made:
    """torch's own encoder layer in training, dropout everywhere; attention dropout and drop path by hand."""

    def compute(self: Any, x: Tensor) -> Any:
        hidden = self.layer(x)
        q, k, v = self.qkv(hidden).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        kept = torch.rand(x.shape[0], 1, 1) < 0.9
        return self.head(hidden + mixed * kept / 0.9 + 0.1 * torch.randn_like(x)).logsumexp(-1).mean()

    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return Computed(compute, layer=layer, qkv=nn.Linear(32, 96), head=nn.Linear(32, 8)), (normal(BATCH, 6, 32),)


def translator() -> Made:
    """torch's own Transformer, encoder and decoder, with a causal mask and padding."""

    def compute(self: Any, source: Tensor, target: Tensor, pad: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        args = {"tgt_mask": mask, "src_key_padding_mask": pad, "memory_key_padding_mask": pad}
        return self.head(self.body(self.embed(source), self.embed(target), **args))

    body = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    pad = torch.arange(6) >= (torch.arange(BATCH)[:, None] % 3 + 4)
    model = Computed(compute, body=body, embed=nn.Embedding(40, 32), head=nn.Linear(32, 40))
    return model, (below(40, BATCH, 6), below(40, BATCH, 5, seed=1), pad)


def crf() -> Made:
    """A linear-chain conditional random field: a scan of log-sum-exps, a gathered path."""

    def compute(self: Any, x: Tensor, tags: Tensor) -> Any:
        scores = self.emit(x)
        total = scores[:, 0]
        for time in range(1, x.shape[1]):
            total = torch.logsumexp(total[:, :, None] + self.transition + scores[:, time, None], 1)
        path = scores.gather(2, tags[..., None]).squeeze(-1).sum(1) + self.transition[tags[:, :-1], tags[:, 1:]].sum(1)
        return (total.logsumexp(-1) - path).mean()

    return Computed(compute, emit=nn.Linear(6, 5), transition=weight(5, 5)), (normal(BATCH, 7, 6), below(5, BATCH, 7))


def recognizer() -> Made:
    """Convolution over a spectrogram, a GRU, the CTC loss."""

    def compute(self: Any, x: Tensor, targets: Tensor) -> Any:
        hidden, _ = self.gru(self.conv(x).relu().transpose(1, 2))
        scores = self.head(hidden).log_softmax(-1).transpose(0, 1)
        lengths: Any = (scores.shape[0],) * x.shape[0], (3,) * x.shape[0]
        return F.ctc_loss(scores, targets, *lengths)

    members = {"conv": nn.Conv1d(8, 16, 3, 2, 1), "gru": nn.GRU(16, 16, batch_first=True), "head": nn.Linear(16, 10)}
    return Computed(compute, **members), (normal(BATCH, 8, 24), below(9, BATCH, 3) + 1)


def selective_scan() -> Made:
    """A state-space recurrence as a loop over time, and as cumulative sums of logarithms."""

    def compute(self: Any, x: Tensor) -> Any:
        step = F.softplus(self.step(x))
        decay = torch.exp(-step.unsqueeze(-1) * self.rates.exp())
        drive = (step * x).unsqueeze(-1) * self.enter(x).unsqueeze(2)
        state, outputs = torch.zeros(x.shape[0], *decay.shape[2:]), []
        for time in range(x.shape[1]):
            state = decay[:, time] * state + drive[:, time]
            outputs.append((state * self.leave(x[:, time]).unsqueeze(1)).sum(-1))
        return torch.stack(outputs, 1) + torch.exp(-step.cumsum(1)) * x

    members = {"step": nn.Linear(8, 8), "enter": nn.Linear(8, 4), "leave": nn.Linear(8, 4), "rates": weight(8, 4)}
    return Computed(compute, **members), (normal(BATCH, 6, 8),)


def dense_experts() -> Made:
    """A mixture of experts in einsum, with a dispatch of fixed capacity by one-hot and cumsum."""

    def compute(self: Any, x: Tensor) -> Any:
        scores = self.router(x).softmax(-1)
        best, chosen = scores.max(-1)
        hit = F.one_hot(chosen, 4)
        place = (hit.cumsum(0) - 1) * hit
        sent = F.one_hot(place.sum(-1).clamp(max=7), 8).float() * (place.sum(-1) < 8).unsqueeze(-1)
        dispatch = torch.einsum("te,tc->tec", hit.float(), sent)
        inside = torch.einsum("tec,td->ecd", dispatch, x)
        inside = torch.einsum("ecf,efd->ecd", torch.einsum("ecd,edf->ecf", inside, self.up).relu(), self.down)
        mixed = torch.einsum("tec,ecd->td", dispatch * best[:, None, None], inside)
        return mixed.square().mean() + (hit.float().mean(0) * scores.mean(0)).sum()

    return Computed(compute, router=nn.Linear(8, 4), up=weight(4, 8, 16), down=weight(4, 16, 8)), (normal(24, 8),)


def byte_mixer() -> Made:
    """An MLP mixer with several outputs of several dtypes, nested, and one that is None."""

    def compute(self: Any, x: Tensor) -> dict[str, Any]:
        hidden = x + self.across(x.transpose(1, 2)).transpose(1, 2)
        hidden = hidden + self.along(F.layer_norm(hidden, (16,)))
        return {"tokens": [hidden, hidden.round().to(torch.int32)], "wide": hidden.double().var(1), "cache": None}

    return Computed(
        compute, across=nn.Linear(6, 6), along=nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    ), (normal(BATCH, 6, 16),)
