"""CTC of fixed shape: equal to torch's, and registered as PyTorch demands."""

from __future__ import annotations

import pytest
import torch

import autopar.ops  # noqa: F401  (registers the ops)

ops = torch.ops.autopar


def arguments() -> tuple[torch.Tensor, ...]:
    """(log_probs, targets, input_lengths, target_lengths)."""
    scores = torch.randn(7, 3, 5, dtype=torch.float64).log_softmax(-1)
    targets = torch.tensor([[1, 2, 3, 0], [2, 1, 0, 0], [4, 0, 0, 0]])
    return scores.requires_grad_(), targets, torch.tensor([7, 6, 4]), torch.tensor([3, 2, 1])


def test_the_loss_and_its_gradient_equal_torchs() -> None:
    scores, *rest = arguments()
    reference = torch.nn.functional.ctc_loss(scores, *rest, reduction="none")
    loss, alpha = ops.ctc_loss(scores, *rest, 0, False)
    torch.testing.assert_close(loss, reference)
    assert alpha.shape == (3, 7, 9)
    grad = torch.randn_like(loss)
    torch.testing.assert_close(torch.autograd.grad(loss, scores, grad), torch.autograd.grad(reference, scores, grad))


def test_an_empty_batch_has_an_empty_loss() -> None:
    scores, targets, *lengths = arguments()
    loss, _ = ops.ctc_loss(scores[:, :0], targets[:0], *(item[:0] for item in lengths), 0, False)
    assert loss.shape == (0,)


@pytest.mark.parametrize("overload", ["ctc_loss", "ctc_loss_backward"])
def test_the_ops_are_registered_as_pytorch_demands(overload: str) -> None:
    args = arguments()
    loss, alpha = (item.detach() for item in ops.ctc_loss(*args, 0, False))
    plain = tuple(item.detach() for item in args)
    calls = {"ctc_loss": (*plain, 0, False), "ctc_loss_backward": (loss.sin(), *plain, loss, alpha, 0, False)}
    torch.library.opcheck(
        getattr(ops, overload).default, calls[overload], test_utils=("test_schema", "test_faketensor")
    )
