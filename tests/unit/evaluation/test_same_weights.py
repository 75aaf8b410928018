"""A half-finished evaluation must not be finished by another model that has the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from robustdist.attacks import PGD
from robustdist.errors import RobustDistWarning
from robustdist.evaluation import RobustTally
from robustdist.evaluation.identity import attacks_hash, code_text, model_hash
from robustdist.evaluation.journal import Journal


class Flipped(nn.Module):
    """Its answers depend on a plain attribute, which no hash of weights sees."""

    def __init__(self, flip):
        super().__init__()
        self.flip = flip

    def forward(self, x):
        logits = torch.stack([x.mean((1, 2, 3)), 0.5 - 0 * x.mean((1, 2, 3))], 1)
        return logits.flip(1) if self.flip else logits


def tally_of(folder, flip, count):
    x = torch.linspace(0.1, 0.9, 8).view(8, 1, 1, 1).expand(8, 1, 2, 2).contiguous()
    y = (x.mean((1, 2, 3)) < 0.5).long()
    journal = Journal(folder, {"weights": "the same"}, 0, lambda value: [value])
    tally = RobustTally({"pgd": PGD(eps=0.05, steps=2)}, journal=journal)
    model = Flipped(flip)
    tally.update(model, model, x[:count], y[:count], list(range(count)))
    journal.close()
    return tally.result()


def test_images_that_are_predicted_otherwise_are_attacked_again(tmp_path):
    assert tally_of(tmp_path, False, 4).clean_acc == 1.0
    with pytest.warns(RobustDistWarning, match="predicts otherwise now"):
        result = tally_of(tmp_path, True, 8)
    assert (result.num_samples, result.num_clean) == (8, 0)


def test_images_that_are_predicted_alike_are_known(tmp_path):
    tally_of(tmp_path, False, 4)
    assert tally_of(tmp_path, False, 8).clean_acc == 1.0


def test_functions_of_one_name_are_told_apart_by_their_code():
    def with_constant(value):
        return (lambda logits, y: logits.sum(1)) if value else (lambda logits, y: logits.amax(1))

    first, second = (PGD(attack_loss=with_constant(value)) for value in (0, 1))
    assert attacks_hash({"pgd": first}) != attacks_hash({"pgd": second})
    assert attacks_hash({"pgd": first}) == attacks_hash({"pgd": PGD(attack_loss=with_constant(0))})
    assert "0x" not in code_text(with_constant)


def test_buffers_that_no_checkpoint_holds_are_part_of_the_model():
    first, second = nn.Identity(), nn.Identity()
    for module, mean in ((first, 0.0), (second, 0.5)):
        module.register_buffer("mean", torch.tensor(mean), persistent=False)
    assert model_hash(first) != model_hash(second)
