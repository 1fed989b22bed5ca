"""Graphs, tables, algebra, custom functions and ops, frozen and generated weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.zoo.plain.computed import BATCH, Computed, Made, below, normal, weight


def graph_net() -> Made:
    """Messages along edges, summed by index_add, averaged by scatter_reduce, weighed by a softmax over neighbours."""

    def compute(self: Any, nodes: Tensor, source: Tensor, target: Tensor) -> Any:
        hidden = self.embed(nodes)
        message = self.message(torch.cat([hidden[source], hidden[target]], -1)).relu()
        summed = torch.zeros_like(hidden).index_add(0, target, message)
        index = target.unsqueeze(-1).expand_as(message)
        mean = torch.zeros_like(hidden).scatter_reduce(0, index, message, "mean", include_self=False)
        score = F.leaky_relu(self.score(message).squeeze(-1), 0.2)
        top = torch.full((hidden.shape[0],), -1e9).scatter_reduce(0, target, score.detach(), "amax")
        share = (score - top[target]).exp()
        total = torch.zeros(hidden.shape[0]).scatter_add(0, target, share)
        attended = torch.zeros_like(hidden).index_add(0, target, message * (share / total[target]).unsqueeze(-1))
        return self.head(torch.cat([hidden, summed, mean, attended], -1))

    members = {
        "embed": nn.Linear(6, 16),
        "message": nn.Linear(32, 16),
        "score": nn.Linear(16, 1),
        "head": nn.Linear(64, 3),
    }
    return Computed(compute, **members), (normal(24, 6), below(24, 64), below(24, 64, seed=1))


def recommender() -> Made:
    """DLRM: embedding bags over large tables, products of all pairs of features, a binary loss."""

    def compute(self: Any, dense: Tensor, sparse: Tensor, labels: Tensor) -> Any:
        bottom = self.bottom(dense)
        bags = [bag(part) for bag, part in zip(self.bags, sparse.unbind(1), strict=True)]
        features = torch.stack([bottom, *bags], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        top = self.top(torch.cat([bottom, products[:, rows, columns]], 1))
        return F.binary_cross_entropy_with_logits(top.squeeze(-1), labels)

    bags = nn.ModuleList(
        nn.EmbeddingBag(size, 8, mode=mode) for size, mode in ((512, "sum"), (64, "mean"), (33, "sum"))
    )
    model = Computed(
        compute, bags=bags, bottom=nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), top=nn.Linear(14, 1)
    )
    return model, (normal(BATCH, 4), below(33, BATCH, 3, 5), below(2, BATCH).float())


def mixed_ops() -> Made:
    """where, cumsum, cumprod, sort, topk, argmax, gather, one_hot, logical and bool tensors, clamp, flip, roll."""

    def compute(self: Any, x: Tensor, index: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        ordered, places = hidden.sort(-1, descending=True)
        best, where = hidden.topk(4, -1)
        running = hidden.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        chosen = hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        positive = (hidden > 0) & ~(hidden > 1) | torch.isclose(hidden, torch.zeros(()))
        mixed = torch.where(positive, hidden.exp(), running.flip(1)) * places.float().mean()
        counts = F.one_hot(where, 16).sum(2)
        decay = hidden.sigmoid().cumprod(1)
        return {
            "mixed": mixed + ordered * decay, "best": best, "hits": counts, "any": positive.any(-1),
            "first": hidden.argmax(-1), "range": hidden.amax(-1) - hidden.amin(-1), "norm": F.normalize(hidden, dim=-1),
            "chosen": chosen.roll(1, -1),
        }  # fmt: skip

    return Computed(compute, body=nn.Linear(8, 16)), (normal(BATCH, 6, 8), below(6, BATCH, 3))


def per_sample_gradients() -> Made:
    """torch.func inside of a model: vmap over the batch of the gradient of a small energy."""

    def compute(self: Any, x: Tensor) -> Any:
        def energy(position: Tensor) -> Any:
            return self.out(self.body(position).tanh()).squeeze(-1)

        force = torch.func.vmap(torch.func.grad(energy))(x)
        return self.head(force) + torch.func.vmap(lambda row: row @ self.mix)(x)

    members = {"body": nn.Linear(6, 16), "out": nn.Linear(16, 1), "head": nn.Linear(6, 6), "mix": weight(6, 6)}
    return Computed(compute, **members), (normal(BATCH, 6),)


class Rounded(torch.autograd.Function):
    """Rounds; its gradient passes straight through where the value was in range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1), None


def quantized() -> Made:
    """A custom autograd function: inputs and weights in few bits.

    What is summed before it is not rounded: there the order of additions would decide.
    """

    def compute(self: Any, x: Tensor) -> Any:
        rounded: Any = Rounded.apply
        hidden = F.linear(rounded(x, 0.125), rounded(self.first, 0.05)).tanh()
        return F.linear(hidden, rounded(self.second, 0.05))

    return Computed(compute, first=weight(16, 8), second=weight(4, 16)), (normal(BATCH, 8),)


@torch.library.custom_op("autopar_zoo::soft_threshold", mutates_args=())
def soft_threshold(x: Tensor, width: float) -> Tensor:
    """x moved towards 0 by `width`."""
    return x.sign() * (x.abs() - width).clamp(min=0)


@soft_threshold.register_fake
def _(x: Tensor, width: float) -> Tensor:
    return torch.empty_like(x)


def _kept(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


soft_threshold.register_autograd(lambda ctx, grad: (grad * (ctx.saved_tensors[0] != 0), None), setup_context=_kept)


def sparse_coder() -> Made:
    """A custom op of a user's own library, in an unrolled iteration."""

    def compute(self: Any, x: Tensor) -> Any:
        code = torch.zeros(x.shape[0], self.words.shape[0])
        for _ in range(3):
            code = soft_threshold(code + 0.1 * (x - code @ self.words) @ self.words.t(), 0.02)
        return F.mse_loss(code @ self.words, x) + 0.1 * code.abs().mean()

    return Computed(compute, words=weight(24, 16)), (normal(BATCH, 16),)


def autoencoder() -> Made:
    """A variational one: drawn codes, a divergence, tied weights."""

    def compute(self: Any, x: Tensor) -> Any:
        mean, log_variance = self.encode(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        rebuilt = F.linear(code, self.decode.weight.t() @ self.decode.weight[:, :4])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        return F.mse_loss(rebuilt[:, : x.shape[-1]], x[:, : rebuilt.shape[-1]]) + 0.1 * divergence.mean()

    return Computed(compute, encode=nn.Linear(12, 8), decode=nn.Linear(12, 6)), (normal(BATCH, 12),)


def contrastive() -> Made:
    """Normalized embeddings, all pairwise similarities, a temperature that is trained, distances and a hinge."""

    def compute(self: Any, left: Tensor, right: Tensor) -> Any:
        a, b = F.normalize(self.one(left), dim=-1), F.normalize(self.other(right), dim=-1)
        scores = a @ b.t() * self.temperature.exp()
        labels = torch.arange(a.shape[0])
        loss = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2
        return (
            loss
            + F.triplet_margin_loss(a, b, b.roll(1, 0))
            + torch.cdist(a, b).mean()
            + F.cosine_similarity(a, b).mean()
        )

    members = {"one": nn.Linear(12, 8), "other": nn.Linear(10, 8), "temperature": torch.tensor(1.0)}
    return Computed(compute, **members), (normal(BATCH, 12), normal(BATCH, 10, seed=1))


def gaussian_process() -> Made:
    """Linear algebra: a kernel matrix, Cholesky, triangular solves, a log-determinant."""

    def compute(self: Any, x: Tensor, y: Tensor) -> Any:
        features = self.features(x).tanh()
        distance = (features[:, None] - features[None]).square().sum(-1)
        kernel = self.scale.exp() * (-distance).exp() + 0.1 * torch.eye(x.shape[0])
        lower = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y.unsqueeze(-1), lower).squeeze(-1)
        return 0.5 * (y @ solved) + lower.diagonal().log().sum()

    return Computed(compute, features=nn.Linear(4, 3), scale=torch.tensor(0.5)), (normal(16, 4), normal(16, seed=1))


def adapters() -> Made:
    """Frozen weights with low-rank additions, one of them generated from the input."""

    def compute(self: Any, x: Tensor) -> Any:
        hidden = self.base(x) + x @ self.down @ self.up
        made = self.hyper(x.mean(1)).view(-1, 16, 4)
        return torch.bmm(hidden, made) + self.second(hidden)

    base = nn.Linear(8, 16).requires_grad_(requires_grad=False)
    members = {
        "base": base,
        "down": weight(8, 2),
        "up": weight(2, 16),
        "hyper": nn.Linear(8, 64),
        "second": nn.Linear(16, 4),
    }
    return Computed(compute, **members), (normal(BATCH, 5, 8),)
