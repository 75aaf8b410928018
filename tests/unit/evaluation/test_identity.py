"""Hashes change with everything that decides a verdict, and with nothing else."""

from __future__ import annotations

import copy

import pytest
import torch

from robustdist.attacks import FGSM, PGD
from robustdist.core.testing import TinyNet, toy_images
from robustdist.evaluation.identity import attacks_hash, image_digests, model_hash


def test_the_hash_of_a_model_follows_weights_buffers_and_number_format():
    net = TinyNet(batch_norm=True)
    same = copy.deepcopy(net).train(not net.training)
    assert model_hash(same) == model_hash(net)
    hashes = {model_hash(net)}
    for change in (
        lambda n: n.head.weight.data[0, 0].add_(1e-6),
        lambda n: n.norm.running_mean.add_(1),
        lambda n: n.norm.num_batches_tracked.add_(1),
        lambda n: n.to(torch.bfloat16),
        lambda n: n.head.weight.data.copy_(n.head.weight.data.flip(0)),
    ):
        changed = copy.deepcopy(net)
        change(changed)
        hashes.add(model_hash(changed))
    assert len(hashes) == 6
    assert model_hash(torch.nn.Sequential(net)) not in hashes


def test_the_hash_of_a_model_does_not_depend_on_memory_order():
    net = TinyNet(channels=3)
    other = copy.deepcopy(net).to(memory_format=torch.channels_last)
    assert model_hash(other) == model_hash(net)


@pytest.mark.parametrize(
    "other",
    [
        {"a": PGD(eps=0.1, steps=3, seed=1)},
        {"a": PGD(eps=0.1, steps=4)},
        {"a": PGD(eps=0.1 + 1e-9, steps=3)},
        {"b": PGD(eps=0.1, steps=3)},
        {"a": FGSM(eps=0.1)},
        {"a": PGD(eps=0.1, steps=3), "b": FGSM(eps=0.1)},
        {"a": PGD(eps=0.1, steps=3, attack_loss="margin")},
    ],
)
def test_the_hash_of_attacks_follows_their_settings(other):
    assert attacks_hash({"a": PGD(eps="1/10", steps=3)}) == attacks_hash({"a": PGD(eps=0.1, steps=3)})
    assert attacks_hash(other) != attacks_hash({"a": PGD(eps=0.1, steps=3)})


def test_the_digest_of_an_image_follows_its_pixels_and_label_alone():
    x, y = toy_images(6)
    digests = image_digests(x, y)
    assert len(set(digests.tolist())) == 6
    assert (digests > 0).all()
    order = torch.tensor([3, 0, 5])
    assert torch.equal(image_digests(x[order], y[order]), digests[order])
    assert torch.equal(image_digests(x.flip(0).flip(0), y), digests)
    changed = x.clone()
    changed[2, 0, 0, 0] += 1e-6
    assert (image_digests(changed, y) != digests).tolist() == [False, False, True, False, False, False]
    relabelled = y.clone()
    relabelled[1] = 3 - relabelled[1]
    assert (image_digests(x, relabelled) != digests).tolist() == [False, True, False, False, False, False]
