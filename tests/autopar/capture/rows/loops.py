"""Layers of experts as people write them: a loop over the tokens that each expert was given."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, WIDTH, HIDDEN, CHOICES = 4, 8, 12, 2


class Loop(nn.Module):
    """A router and experts; a subclass says how tokens [T, H] go to them, by scores and choices [T, K]."""

    def __init__(self, expert: type[nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)
        made = [(expert or FeedForward)() for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(made)
        self.double()

    def route(self, favourite: int | None = None, never: int | None = None) -> Loop:
        """Let all tokens go to one expert first, and none to another."""
        with torch.no_grad():
            if favourite is not None:
                self.router.bias[favourite] = 100.0
            if never is not None:
                self.router.bias[never] = -100.0
        return self

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(tokens).softmax(-1).topk(CHOICES, -1)
        return x + self.mixed(tokens, scores / scores.sum(-1, keepdim=True), chosen).reshape(x.shape)

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Fused(nn.Module):
    """Both gates in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(gate.sigmoid() * up)
        return out


class Normalized(nn.Module):
    """More than a feed-forward network: norms, a residual, ops in place, and one that has no slope at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.inner(self.norm(x)), inplace=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-3)
        y += 0.5
        heads = y.view(y.shape[0], 2, WIDTH // 2).softmax(-1)
        return x + heads.reshape(-1, WIDTH) * y


class Mixtral(Loop):
    """The original code of Mixtral in transformers."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        final = torch.zeros_like(x)
        expert_mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for expert_idx in range(EXPERTS):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx])
            if top_x.shape[0] == 0:
                continue
            current_state = x[None, top_x].reshape(-1, x.shape[-1])
            current = expert_layer(current_state) * scores[top_x, idx, None]
            final.index_add_(0, top_x, current.to(x.dtype))
        return final


class Hits(Loop):
    """What transformers made of it later: a loop over the experts that are hit."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        final = torch.zeros_like(x)
        with torch.no_grad():
            expert_mask = F.one_hot(chosen, num_classes=EXPERTS + 1).permute(2, 1, 0)
            expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_idx = expert_idx[0]
            with torch.no_grad():
                idx, top_x = torch.where(expert_mask[expert_idx])
            current = self.experts[int(expert_idx)](x[top_x]) * scores[top_x, idx, None]
            final.index_add_(0, top_x, current)
        return final


class BusyHits(Loop):
    """Experts with few tokens are left out."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        final = torch.zeros_like(x)
        expert_mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for expert_idx in torch.greater(expert_mask.sum(dim=(-1, -2)), 7).nonzero():
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current = self.experts[expert_idx](x[top_x]) * scores[top_x, idx, None]
            final.index_add_(0, top_x, current)
        return final


class Masked(Loop):
    """Boolean indexing on both sides."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for k in range(CHOICES):
            for e, expert in enumerate(self.experts):
                mask = chosen[:, k] == e
                if mask.any():
                    out[mask] += scores[mask, k].unsqueeze(-1) * expert(x[mask])
        return out


class Flat(Loop):
    """The first code of DeepSeek's: a row per choice, written over what was empty."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        flat, rows = chosen.view(-1), x.repeat_interleave(CHOICES, dim=0)
        y = torch.empty_like(rows)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(rows[flat == i])
        return (y.view(*scores.shape, -1) * scores.unsqueeze(-1)).sum(dim=1)


class Ranked(Loop):
    """The first code of Mistral's: no expert is chosen twice by a token, so that every place is written once."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            out[token] += scores[token, slot, None] * expert(x.index_select(0, token))
        return out


class Positions(Loop):
    """Positions by `nonzero`, results out of place."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token_idx = (chosen == e).any(-1).nonzero().squeeze(-1)
            weight = (scores * (chosen == e)).sum(-1)
            rows = self.experts[e](x[token_idx]) * weight[token_idx].unsqueeze(1)
            out = out.index_add(0, token_idx, rows)
        return out


class Columns(Loop):
    """Positions as the columns of a matrix; skipped by a negated question."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            mask = chosen == e
            if not mask.any():
                continue
            places = mask.nonzero()
            token, slot = places[:, 0], places[:, 1]
            out.index_put_((token,), self.experts[e](x[token]) * scores[token, slot][:, None], accumulate=True)
        return out


class Overlapping(Loop):
    """Masks of which a token may be in several, and a branch that the input as a whole decides."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            mask = x[:, e] > 0
            out[mask] += self.experts[e](x[mask])
        if x[:, 0].sum() > 0:
            token_idx = (x[:, 1] > 0).nonzero().flatten()
            out.index_add_(0, token_idx, self.experts[0](x[token_idx]))
        return out


class Sorted(Loop):
    """Tokens sorted by expert, split by how many there are, and joined again."""

    def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        sizes = torch.zeros(x.shape[0], EXPERTS, dtype=torch.long).scatter(1, chosen, 1).sum(0).tolist()
        token = order // CHOICES
        parts = torch.split(x[token], sizes, dim=0)
        joined = torch.cat([self.experts[e](parts[e]) for e in range(EXPERTS)], dim=0)
        return torch.zeros_like(x).index_add(0, token, joined * scores.flatten()[order, None])


ONE_OP: list[tuple[type[Loop], type[nn.Module]]] = [
    *((kind, FeedForward) for kind in (Mixtral, Hits, BusyHits, Masked, Flat, Columns, Ranked)),
    (Mixtral, Gated),
    (Hits, Fused),
]
LOOPS = [*ONE_OP, *((kind, Normalized) for kind in (Mixtral, Hits, BusyHits, Masked, Flat, Columns, Ranked, Sorted))]
LOOPS += [(kind, FeedForward) for kind in (Positions, Overlapping, Sorted)]
