"""One local step against plain torch: passes, rows, means, and rows that join the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from perdure.contract import Batch, ContractError, Rows, Scalar, Step
from perdure.contract.step import join_rows, masked_mean, mean_loss, mean_target_loss, target_losses
from perdure.core.trees import Tensors
from perdure.models.modules.mlp import MlpModel
from perdure.models.network import Network, Outputs, make_network
from perdure.models.ops import ForwardPass

ROWS, INPUTS, CLASSES = 5, 4, 6
OUTPUTS = Outputs("shared", CLASSES, (tuple(range(CLASSES)),))
NETWORK = make_network(MlpModel(hidden=[7]), (INPUTS,), OUTPUTS)
PADDED = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
ACTIVE = torch.tensor([True, False, True, True, False, True])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def params(seed: int = 0) -> Tensors:
    return NETWORK.init(torch.Generator().manual_seed(seed))[0]


def plain_logits(values: Tensors, x: Tensor) -> Tensor:
    hidden = torch.relu(functional.linear(x, values["fc1.weight"], values["fc1.bias"]))
    return functional.linear(hidden, values["head.weight"], values["head.bias"])


def step(network: Any = NETWORK, **batch: Any) -> Step:
    y = torch.tensor([0, 2, 3, 5, 2])
    whole = Batch(drawn(ROWS, INPUTS), y, **batch)
    fwd = ForwardPass(train=True, mask=whole.mask)
    return Step(params(), whole, {"params": params()}, {}, torch.tensor(3), network, fwd)


# ---- passes


def test_logits_are_those_of_the_network() -> None:
    one = step()
    expected = plain_logits(one.params, one.batch.x)
    torch.testing.assert_close(one.logits(), expected)
    torch.testing.assert_close(one.classify(one.features()), expected)
    torch.testing.assert_close(
        one.features(), torch.relu(one.batch.x @ params()["fc1.weight"].T + params()["fc1.bias"])
    )


def test_features_and_logits_are_computed_once() -> None:
    class Counting:
        passes = heads = 0

        def features(self, *arguments: Any) -> Tensor:
            self.passes += 1
            return NETWORK.features(*arguments)

        def classify(self, *arguments: Any) -> Tensor:
            self.heads += 1
            return NETWORK.classify(*arguments)

    network = Counting()
    one = step(network)
    for _ in range(3):
        assert one.logits() is one.logits()
        assert one.features() is one.features()
    assert (network.passes, network.heads) == (1, 1)
    more = join_rows(one, Rows(drawn(2, INPUTS), torch.zeros(2, dtype=torch.int64), torch.ones(2)))
    assert more.logits().shape == (ROWS + 2, CLASSES)  # other rows are computed again
    assert network.passes == 2


def test_another_models_logits_have_no_gradient() -> None:
    one = step()
    other = {name: value.requires_grad_() for name, value in params(seed=1).items()}
    found = one.logits_of(other, {})
    assert not found.requires_grad
    torch.testing.assert_close(found, plain_logits(other, one.batch.x).detach())


def test_another_model_runs_in_evaluation_mode() -> None:
    network: Network = make_network(MlpModel(hidden=[7], dropout=0.9), (INPUTS,), OUTPUTS)
    one = step(network)
    found = [replace(one, key=torch.tensor(key)).logits_of(params(), {}) for key in (1, 2)]
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], plain_logits(params(), one.batch.x))


# ---- losses


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("active", [None, ACTIVE], ids=["all outputs", "some outputs"])
def test_cross_entropy_of_every_row(mask: Tensor | None, active: Tensor | None) -> None:
    one = step(mask=mask, active_outputs=active)
    found = one.cross_entropy(one.logits())
    columns = torch.arange(CLASSES) if active is None else active.nonzero().flatten()
    among = plain_logits(one.params, one.batch.x)[:, columns]
    y = torch.tensor([columns.tolist().index(int(label)) for label in one.batch.y])
    torch.testing.assert_close(found, functional.cross_entropy(among, y, reduction="none"))


def test_every_row_may_have_its_own_outputs() -> None:
    active = torch.zeros(ROWS, CLASSES, dtype=torch.bool)
    batch = Batch(drawn(ROWS, INPUTS), torch.tensor([0, 2, 3, 5, 2]), None, active)
    for row, label in enumerate(batch.y.tolist()):
        active[row, [label, (label + 1 + row) % CLASSES if row != 5 else 0]] = True
    logits = drawn(ROWS, CLASSES, seed=3)
    for row, found in enumerate(target_losses(logits, batch)):
        label = int(batch.y[row])
        among = logits[row, active[row]]
        expected = among.exp().sum().log() - logits[row, label]
        torch.testing.assert_close(found, expected)


def test_a_mean_is_over_the_rows_that_are_not_padding() -> None:
    values, among = drawn(ROWS), torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])
    assert step().mean(values) == values.mean()
    torch.testing.assert_close(step(mask=PADDED).mean(values), values[:3].mean())
    torch.testing.assert_close(step(mask=PADDED).mean(values, among), values[1:3].mean())
    torch.testing.assert_close(step().mean(values, among), values[1:4].mean())
    assert step(mask=PADDED).mean(values, 1 - PADDED) == 0
    assert masked_mean(values, torch.zeros(ROWS)) == 0


def test_terms_are_averaged_or_taken_as_they_are() -> None:
    one, rows = step(mask=PADDED), drawn(ROWS)
    torch.testing.assert_close(mean_loss("loss", rows, one), rows[:3].mean())
    assert mean_loss("loss", Scalar(torch.tensor(7.0)), one) == 7
    both = mean_loss("penalty", [rows, Scalar(torch.tensor(7.0)), 2 * rows], one)
    torch.testing.assert_close(both, 7 + 3 * rows[:3].mean())


@pytest.mark.parametrize(
    ("term", "sentence"),
    [
        (
            torch.tensor(1.0),
            r"loss: must be one value per row \(\[5\]\), which .*, got a single value",
        ),
        (torch.ones(5, 6), r"loss: must be one value per row \(\[5\]\), got shape \[5, 6\]"),
        (torch.ones(4), r"loss: must be one value per row \(\[5\]\), got shape \[4\]"),
        (1.0, r"loss: must be a tensor with one value per row \(\[5\]\), got a float"),
        (
            Scalar(torch.ones(5)),
            r"loss: must be a Scalar of one value, got a Scalar of shape \[5\]",
        ),
        (
            [torch.ones(5), None],
            r"loss: must be a tensor with one value per row \(\[5\]\), got None",
        ),
    ],
    ids=["one value", "matrix", "too few", "float", "scalar with rows", "inside a list"],
)
def test_other_terms_are_refused(term: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        mean_loss("loss", term, step())


# ---- rows that join the batch


def rows(count: int, seed: int, mask: Tensor | None = None, active: Tensor | None = None) -> Rows:
    y = torch.full((count,), seed, dtype=torch.int64)
    mask = torch.ones(count) if mask is None else mask
    return Rows(drawn(count, INPUTS, seed=seed), y, mask, active)


def test_extra_rows_are_first_and_padding_is_last() -> None:
    one, extra = step(mask=PADDED), rows(2, 1, torch.tensor([1.0, 0.0]))
    joined = join_rows(one, extra)
    assert torch.equal(joined.batch.x, torch.cat([extra.x, one.batch.x]))
    assert joined.batch.y.tolist() == [1, 1, 0, 2, 3, 5, 2]
    assert joined.batch.mask is not None
    assert joined.batch.mask.tolist() == [1, 0, 1, 1, 1, 0, 0]
    assert joined.fwd.mask is joined.batch.mask
    assert (joined.batch.extra, joined.extra) == (2, slice(0, 2))
    values = torch.arange(7.0)
    assert joined.mean(values) == pytest.approx((0 + 2 + 3 + 4) / 4)
    loss = joined.mean(joined.cross_entropy(joined.logits()))
    real = torch.tensor([0, 2, 3, 4])
    logits = plain_logits(one.params, joined.batch.x[real])
    torch.testing.assert_close(loss, functional.cross_entropy(logits, joined.batch.y[real]))


def test_extra_rows_may_weigh_more_or_less() -> None:
    extra = replace(rows(2, 1, torch.tensor([1.0, 0.0])), weight=torch.tensor([0.5, 9.0]))
    joined = join_rows(step(mask=PADDED), extra)
    values = torch.arange(7.0)
    assert joined.mean(values) == pytest.approx((0.5 * 0 + 2 + 3 + 4) / 3.5)
    logits = joined.logits()
    torch.testing.assert_close(
        mean_target_loss(logits, joined.batch), joined.mean(joined.cross_entropy(logits))
    )
    with pytest.raises(ContractError) as refusal:
        join_rows(step(), replace(rows(2, 1), weight=torch.ones(3)))
    assert str(refusal.value).startswith(
        "extra_rows: must be one weight per row ([2]), got a weight of shape [3]"
    )


def test_a_batch_without_padding_gets_a_mask() -> None:
    joined = join_rows(step(), rows(2, 1, torch.tensor([0.0, 1.0])))
    assert joined.batch.mask is not None
    assert joined.batch.mask.tolist() == [0, 1, 1, 1, 1, 1, 1]


def test_the_rows_of_several_methods_keep_their_places() -> None:
    joined = join_rows(step(), {"er": rows(2, 1), "target": rows(3, 2)})
    assert joined.extra_by_method == {"er": slice(0, 2), "target": slice(2, 5)}
    assert joined.batch.y.tolist() == [1, 1, 2, 2, 2, 0, 2, 3, 5, 2]
    assert joined.batch.extra == 5
    assert joined.extra == slice(0, 0)  # no method is alone, so none is meant


def test_extra_rows_may_have_other_outputs() -> None:
    own = torch.zeros(2, CLASSES, dtype=torch.bool)
    own[:, 1] = True
    joined = join_rows(step(active_outputs=ACTIVE), {"a": rows(2, 1, None, own), "b": rows(1, 2)})
    assert joined.batch.active_outputs is not None
    assert torch.equal(joined.batch.active_outputs[:2], own)
    assert all(torch.equal(row, ACTIVE) for row in joined.batch.active_outputs[2:])
    assert join_rows(step(), rows(2, 1)).batch.active_outputs is None


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (torch.ones(2, INPUTS), "extra_rows: must be a Rows, got a Tensor"),
        (
            replace(rows(2, 1), y=torch.zeros(3)),
            "must be one x, y and mask per row, got 2 x, 3 y and 2 mask",
        ),
        (
            replace(rows(2, 1), x=torch.ones(2, 3)),
            r"must be rows of shape \[4\], got rows of shape \[3\]",
        ),
    ],
    ids=["tensor", "counts", "shape"],
)
def test_rows_that_do_not_fit_are_refused(extra: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        join_rows(step(), extra)
