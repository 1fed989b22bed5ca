"""The asynchronous schedules train as the papers say: their actions, and a reference without a pipeline, agree."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autopar.schedules.generate import Request, generate
from tests.autopar.schedules.interpreter import Interpreter
from tests.autopar.schedules.pipedream_reference import PipeDreamReference, Staleness

MICROBATCHES = 12


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double() for _ in range(count)]


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    shape = (4, 6)
    return [(torch.randn(shape).double(), torch.randn(shape).double()) for _ in range(MICROBATCHES)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def reference(count: int, staleness: Staleness, update_every: int = 1) -> PipeDreamReference:
    made = PipeDreamReference(stages(count), nn.functional.mse_loss, sgd, staleness, update_every=update_every)
    made.run(batches())
    return made


def newest(made: PipeDreamReference) -> list[Tensor]:
    return [weight for versions in made.versions for weight in versions[-1]]


@pytest.mark.parametrize(
    ("name", "staleness", "update_every"),
    [
        ("pipedream", Staleness.STASHING, 1),
        ("pipedream-vertical", Staleness.VERTICAL_SYNC, 1),
        ("pipedream-2bw", Staleness.DOUBLE_BUFFERED, 4),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_actions_give_the_weights_of_the_reference(
    name: str, staleness: Staleness, update_every: int, count: int
) -> None:
    expected = reference(count, staleness, update_every)
    modules = stages(count)
    optimizers = [sgd(list(module.parameters())) for module in modules]
    schedule = generate(name, Request(count, MICROBATCHES, update_every=update_every))
    interpreter = Interpreter(schedule, modules, nn.functional.mse_loss, optimizers, batches())
    interpreter.run()
    found = [parameter.detach() for module in modules for parameter in module.parameters()]
    torch.testing.assert_close(found, newest(expected), rtol=1e-12, atol=1e-12)
    losses = [interpreter.losses[item] for item in range(MICROBATCHES)]
    assert losses == pytest.approx(expected.losses, rel=1e-12)
    assert not interpreter.stashed


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_actions_of_a_synchronous_schedule_give_the_gradients_of_the_whole_batch(name: str) -> None:
    modules, data = stages(3), batches()
    whole = copy.deepcopy(nn.Sequential(*modules))
    loss = nn.functional.mse_loss(whole(torch.cat([value for value, _ in data])), torch.cat([to for _, to in data]))
    torch.autograd.backward(loss)
    Interpreter(generate(name, Request(3, MICROBATCHES)), modules, nn.functional.mse_loss, [], data).run()
    for found, expected in zip(nn.Sequential(*modules).parameters(), whole.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad / MICROBATCHES, expected.grad)


@pytest.mark.parametrize("staleness", list(Staleness))
def test_one_stage_is_plain_training_but_for_the_delay_of_double_buffering(staleness: Staleness) -> None:
    found = reference(1, staleness)
    (module,) = stages(1)
    optimizer = sgd(list(module.parameters()))
    for value, target in batches():
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(module(value), target))
        optimizer.step()
    gap = max(
        float((one.detach() - two).abs().max()) for one, two in zip(module.parameters(), newest(found), strict=True)
    )
    assert gap > 1e-3 if staleness is Staleness.DOUBLE_BUFFERED else gap < 1e-12


def test_without_stashing_the_gradients_are_not_those_of_the_forward() -> None:
    """All but the last stage: there the forward's weights are still the newest at the backward."""
    stashed, overwritten = reference(3, Staleness.STASHING), reference(3, Staleness.NO_STASHING)
    first = next(item for item in range(MICROBATCHES)
                 if not all(map(torch.equal, stashed.gradients[item][0], overwritten.gradients[item][0])))  # fmt: skip
    assert first == 1  # microbatch 0 meets the weights of the start everywhere
    one, two = stashed.gradients[first], overwritten.gradients[first]
    gaps = [max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*pair, strict=True))
            for pair in zip(one, two, strict=True)]  # fmt: skip
    assert gaps[0] > 1e-3
    assert gaps[2] < 1e-12
    ends = [max(float((a - b).abs().max()) for a, b in zip(newest(stashed), newest(overwritten), strict=True))]
    assert ends[0] > 1e-3


def test_every_kind_of_staleness_trains_differently() -> None:
    ends = [
        newest(reference(3, staleness, 3 if staleness is Staleness.DOUBLE_BUFFERED else 1)) for staleness in Staleness
    ]
    for nth, one in enumerate(ends):
        for other in ends[nth + 1 :]:
            assert max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) > 1e-6
