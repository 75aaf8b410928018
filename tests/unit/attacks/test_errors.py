"""Wrong use ends in a UsageError that names the option and what to do instead."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robustdist.attacks import FGSM, PGD, Attack, TorchAttack
from robustdist.errors import UsageError


class ConstantAttack(Attack):
    supports_targeted = False

    def perturb(self, problem):
        return problem.x


CONSTRUCTION = [
    pytest.param(PGD, {"eps": 8}, ["eps=8 is larger", "eps=8/255", "bounds"], id="eps-in-0..255"),
    pytest.param(FGSM, {"eps": "300/255"}, ["eps=1.17647 is larger", "bounds"], id="eps-above-range"),
    pytest.param(PGD, {"eps": 300, "bounds": (0, 255)}, ["eps=300 is larger", "(0, 255)"], id="eps-above-bounds"),
    pytest.param(PGD, {"eps": -0.1}, ["eps=-0.1 must be", "not negative"], id="eps-negative"),
    pytest.param(PGD, {"eps": "-8/255"}, ["eps=-0.0313", "not negative"], id="eps-negative-fraction"),
    pytest.param(PGD, {"eps": float("nan")}, ["eps=nan must be a finite number"], id="eps-nan"),
    pytest.param(PGD, {"eps": float("inf")}, ["eps=inf must be a finite number"], id="eps-inf"),
    pytest.param(PGD, {"eps": "abc"}, ["eps='abc' is not a number", "8/255"], id="eps-word"),
    pytest.param(PGD, {"eps": "1/0"}, ["eps='1/0' is not a number", "8/255"], id="eps-division"),
    pytest.param(PGD, {"eps": "inf"}, ["eps='inf' is not a number"], id="eps-inf-word"),
    pytest.param(PGD, {"eps": ""}, ["eps='' is not a number"], id="eps-empty"),
    pytest.param(PGD, {"eps": True}, ["eps=True is not a number"], id="eps-bool"),
    pytest.param(PGD, {"eps": None}, ["eps=None is not a number"], id="eps-none"),
    pytest.param(PGD, {"eps": [0.1]}, ["eps=[0.1] is not a number"], id="eps-list"),
    pytest.param(PGD, {"step_size": -0.1}, ["step_size=-0.1 must be"], id="step-negative"),
    pytest.param(PGD, {"step_size": "x"}, ["step_size='x' is not a number"], id="step-word"),
    pytest.param(FGSM, {"step_size": "2/"}, ["step_size='2/' is not a number"], id="fgsm-step"),
    pytest.param(PGD, {"steps": 0}, ["steps=0 must be a whole number of at least 1"], id="steps-0"),
    pytest.param(PGD, {"steps": -3}, ["steps=-3 must be a whole number"], id="steps-negative"),
    pytest.param(PGD, {"steps": 2.0}, ["steps=2.0 must be a whole number"], id="steps-float"),
    pytest.param(PGD, {"steps": True}, ["steps=True must be a whole number"], id="steps-bool"),
    pytest.param(PGD, {"steps": "10"}, ["steps='10' must be a whole number"], id="steps-string"),
    pytest.param(PGD, {"restarts": 0}, ["restarts=0 must be a whole number of at least 1"], id="restarts-0"),
    pytest.param(PGD, {"restarts": 2, "random_start": False}, ["restarts", "random_start=True"], id="restarts"),
    pytest.param(PGD, {"norm": "l3"}, ["norm='l3' is unknown", "linf, l2, l1"], id="norm"),
    pytest.param(PGD, {"norm": "Linf"}, ["norm='Linf' is unknown", "linf"], id="norm-case"),
    pytest.param(PGD, {"bounds": (1, 0)}, ["bounds=(1, 0) must be (smallest, largest)"], id="bounds-order"),
    pytest.param(PGD, {"bounds": (0, 0.5, 1)}, ["bounds=(0, 0.5, 1) must be"], id="bounds-three"),
    pytest.param(PGD, {"bounds": 1.0}, ["bounds=1.0 must be (smallest, largest)"], id="bounds-number"),
    pytest.param(PGD, {"bounds": "01"}, ["bounds='01' must be (smallest, largest)"], id="bounds-string"),
    pytest.param(PGD, {"mean": [0.5]}, ["mean and std belong together"], id="mean-alone"),
    pytest.param(PGD, {"std": [0.5]}, ["mean and std belong together"], id="std-alone"),
    pytest.param(PGD, {"mean": [0.5, 0.5], "std": [0.5, 0]}, ["std=[0.5, 0] must be positive"], id="std-zero"),
    pytest.param(PGD, {"mean": 0.5, "std": -1.0}, ["std=-1.0 must be positive"], id="std-negative"),
    pytest.param(PGD, {"attack_loss": "cw"}, ["attack_loss='cw' is unknown", "ce, margin, dlr", "function"], id="loss"),
    pytest.param(PGD, {"model_mode": "test"}, ["model_mode='test' is unknown", "eval or train"], id="mode"),
    pytest.param(
        ConstantAttack, {"targeted": True}, ["ConstantAttack has no targeted mode", "targeted=False"], id="targeted"
    ),
]


def check(error: pytest.ExceptionInfo, words: list[str]) -> None:
    message = str(error.value)
    for word in words:
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize(("kind", "options", "words"), CONSTRUCTION)
def test_wrong_options(kind, options, words):
    with pytest.raises(UsageError) as error:
        kind(**options)
    check(error, words)


def test_numbers_that_are_fine():
    assert PGD(eps="8/255").eps == 8 / 255
    assert PGD(eps=" 8 / 255 ").eps == 8 / 255
    assert PGD(eps="0.03").eps == 0.03
    assert PGD(eps="1e-2").eps == 0.01
    assert PGD(eps=8, bounds=(0, 255)).eps == 8.0
    assert PGD(eps=3, norm="l2").eps == 3.0
    assert PGD(eps=50, bounds=None).eps == 50.0


class Returns(nn.Module):
    """Returns what ``make`` turns the logits of a linear layer into."""

    def __init__(self, make: Any = None, classes: int = 5, before: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(48, classes)
        self.make = make or (lambda logits: logits)
        self.before = before or (lambda x: x)

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(self.before(x).flatten(1)))


def rounded_in_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy().round(2))


X, Y = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])

CALLS = [
    pytest.param(
        PGD(), Returns(), X * 255, Y, ["span [", "bounds=(0.0, 1.0)", "scale them", "mean and std"], id="0..255"
    ),
    pytest.param(PGD(), Returns(), X - 0.5, Y, ["span [", "bounds=(0.0, 1.0)", "mean and std"], id="negative-images"),
    pytest.param(PGD(), Returns(), X + 0.01 * (X.max() == X), Y, ["bounds=(0.0, 1.0)"], id="slightly-above"),
    pytest.param(PGD(), Returns(), X.masked_fill(X > 0.9, torch.nan), Y, ["span [nan, nan]"], id="nan-images"),
    pytest.param(
        PGD(mean=[0.5] * 3, std=[0.2] * 3),
        Returns(),
        X * 255,
        Y,
        ["span [", "bounds=(0.0, 1.0)"],
        id="0..255-normalised",
    ),
    pytest.param(
        PGD(mean=[0.5] * 3, std=[0.2] * 3),
        Returns(),
        ((X - 0.5) / 0.2 * 1.1).bfloat16(),
        Y,
        ["span [", "bounds=(0.0, 1.0)"],
        id="wrong-std-in-bfloat16",
    ),
    pytest.param(PGD(), Returns(), (X * 255).byte(), Y, ["dtype torch.uint8", "floating-point", "convert"], id="bytes"),
    pytest.param(PGD(), Returns(), (X * 2).long(), Y, ["dtype torch.int64", "convert"], id="integers"),
    pytest.param(
        PGD(mean=[0.5] * 2, std=[0.2] * 2),
        Returns(),
        X,
        Y,
        ["mean has 2 entries", "3 channels", "per channel"],
        id="mean",
    ),
    pytest.param(
        PGD(mean=0.5, std=[0.2] * 4), Returns(), X, Y, ["std has 4 entries", "3 channels", "per channel"], id="std"
    ),
    pytest.param(
        PGD(norm="l2", eps=7), Returns(), X, Y, ["eps=7 exceeds the l2 diameter 6.9", "reduce"], id="l2-diameter"
    ),
    pytest.param(PGD(norm="l1", eps=49), Returns(), X, Y, ["eps=49 exceeds the l1 diameter 48"], id="l1-diameter"),
    pytest.param(PGD(), Returns(), X, Y.float(), ["torch.float32 of shape (4,)", "attack_loss"], id="float-labels"),
    pytest.param(PGD(), Returns(), X, Y > 1, ["torch.bool of shape (4,)", "attack_loss"], id="bool-labels"),
    pytest.param(PGD(), Returns(), X, [0, 1, 2, 3], ["targets are list", "attack_loss"], id="list-labels"),
    pytest.param(PGD(), Returns(), X, None, ["targets are NoneType", "attack_loss"], id="no-labels"),
    pytest.param(PGD(), Returns(), X, Y[:, None], ["shape (4, 1)", "attack_loss"], id="labels-2d"),
    pytest.param(PGD(), Returns(), X, Y[:3], ["shape (3,)", "attack_loss"], id="labels-too-few"),
    pytest.param(PGD(), Returns(), X, Y + 2, ["span [2, 5]", "5 classes", "map them"], id="labels-above"),
    pytest.param(PGD(), Returns(), X, Y - 1, ["span [-1, 2]", "5 classes", "map them"], id="labels-below"),
    pytest.param(
        PGD(attack_loss="margin"), Returns(), X, Y + 2, ["span [2, 5]", "5 classes"], id="labels-above-with-margin"
    ),
    pytest.param(
        PGD(), Returns(lambda logits: logits[:, :, None]), X, Y, ["shape (4, 5, 1)", "attack_loss"], id="logits-3d"
    ),
    pytest.param(PGD(), Returns(lambda logits: logits[:, 0]), X, Y, ["shape (4,)", "attack_loss"], id="logits-1d"),
    pytest.param(PGD(), Returns(classes=1), X, Y * 0, ["one output", "attack_loss"], id="one-output"),
    pytest.param(PGD(), Returns(lambda logits: (logits, 1)), X, Y, ["returned tuple", "option forward"], id="tuple"),
    pytest.param(PGD(), Returns(lambda logits: {"loss": 1}), X, Y, ["returned dict", "option forward"], id="no-logits"),
    pytest.param(PGD(), Returns(lambda logits: None), X, Y, ["returned NoneType", "option forward"], id="none"),
    pytest.param(
        PGD(), Returns(before=rounded_in_numpy), X, Y, ["through autograd", "option forward"], id="input-detached"
    ),
    pytest.param(
        PGD(), Returns(torch.Tensor.detach), X, Y, ["through autograd", "no_grad/detach/argmax"], id="output-detached"
    ),
    pytest.param(
        PGD(restarts=2, attack_loss=lambda logits, y: logits.mean()),
        Returns(),
        X,
        Y,
        ["restarts > 1", "attack_loss must return one value per sample"],
        id="restarts-with-scalar-loss",
    ),
]


@pytest.mark.parametrize(("attack", "model", "x", "y", "words"), CALLS)
def test_wrong_calls(attack, model, x, y, words):
    if x.dtype == torch.bfloat16:
        model = model.bfloat16()
    with pytest.raises(UsageError) as error:
        attack(model, x, y)
    check(error, words)
    assert model.training


def test_wrong_number_of_sample_ids():
    for ids in ([1, 2, 3], [1, 2, 3, 4, 5]):
        with pytest.raises(UsageError) as error:
            PGD()(Returns(), X, Y, sample_ids=ids)
        check(error, [f"sample_ids has {len(ids)} entries for 4 inputs", "one per row"])


def test_normalisation_rounded_to_half_precision_is_no_error():
    """White in bfloat16 comes back as 1.002 after undoing the normalisation; that is rounding, not a wrong unit."""
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    extremes = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
    normalised = (extremes - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x_adv = PGD(mean=mean, std=std)(Returns().to(dtype), normalised.to(dtype), Y[:2])
        assert x_adv.dtype == dtype


# --- torchattacks


@pytest.fixture
def torchattacks(require):
    require("torchattacks")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("APGDTT", {}, ["no attack 'APGDTT'", "did you mean 'APGDT'?"]),
        ("pgd", {}, ["no attack 'pgd'", "did you mean 'PGD'?"]),
        ("Deepfol", {}, ["no attack 'Deepfol'", "did you mean 'DeepFool'?"]),
        ("attack", {}, ["no attack 'attack'", "did you mean 'AutoAttack'?"]),  # a module of the package, not a class
        ("???", {}, ["no attack '???'", "did you mean '"]),
        ("PGD", {"num_steps": 3}, ["torchattacks.PGD has no argument 'num_steps'", "it takes eps, alpha, steps"]),
        ("PGD", {"model": 3}, ["torchattacks.PGD has no argument 'model'"]),
        ("CW", {"eps": 0.1}, ["torchattacks.CW has no argument 'eps'", "it takes c, kappa"]),
        ("APGD", {"norm": "l7"}, ["norm='l7' is unknown", "linf, l2, l1"]),
        ("PGD", {"eps": 8}, ["eps=8 is larger", "eps=8/255"]),
        ("PGD", {"eps": "1/0"}, ["eps='1/0' is not a number"]),
        ("PGD", {"alpha": "abc"}, ["alpha='abc' is not a number"]),
        ("PGD", {"mean": [0.5]}, ["mean and std belong together"]),
        ("PGD", {"bounds": None}, ["bounds=None does not work", "(smallest, largest)"]),
        ("MultiAttack", {}, ["torchattacks.MultiAttack combines other attacks", "AutoAttack"]),
        ("LGV", {}, ["torchattacks.LGV needs the argument 'trainloader'", "settings"]),
    ],
)
def test_wrong_torchattacks_options(torchattacks, name, options, words):
    for arguments in (
        ((options, {}), ({}, options)) if "bounds" not in options and "mean" not in options else [({}, options)]
    ):
        with pytest.raises(UsageError) as error:
            TorchAttack(name, arguments[0], **arguments[1])
        check(error, words)


@pytest.mark.parametrize("module", ["torchattacks", "torchattacks.attack"])
def test_torchattacks_missing(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError) as error:
        TorchAttack("PGD")
    check(error, ["TorchAttack('PGD') needs torchattacks", "pip install 'robustdist[attacks]'"])


@pytest.mark.parametrize(
    ("name", "options", "classes", "words"),
    [
        ("APGDT", {}, 3, ["torchattacks.APGDT needs at least 4 classes, the model has 3", "PGD instead"]),
        ("APGDT", {}, 2, ["needs at least 4 classes, the model has 2"]),
        ("AutoAttack", {}, 3, ["torchattacks.AutoAttack needs at least 4 classes"]),
        ("APGD", {"loss": "dlr"}, 2, ["torchattacks.APGD needs at least 3 classes, the model has 2", "loss='ce'"]),
        ("PGD", {}, 1, ["one output", "attack_loss"]),
    ],
)
def test_too_few_classes_for_a_loss(torchattacks, name, options, classes, words):
    with pytest.raises(UsageError) as error:
        TorchAttack(name, options)(Returns(classes=classes), X, Y % classes)
    check(error, words)


@pytest.mark.parametrize("name", ["DeepFool", "APGDT", "FAB"])
def test_targeted_run_of_an_untargeted_attack(torchattacks, name):
    with pytest.raises(UsageError) as error:
        TorchAttack(name, targeted=True)(Returns(), X, Y)
    check(error, [f"torchattacks.{name} has no targeted mode", "targeted=False"])


def test_torchattacks_calls_are_checked_like_our_own(torchattacks):
    attack = TorchAttack("PGD")
    for x, y, words in (
        (X * 255, Y, ["bounds=(0.0, 1.0)", "scale them"]),
        ((X * 255).byte(), Y, ["torch.uint8"]),
        (X, Y.float(), ["torch.float32 of shape (4,)"]),
        (X, Y + 2, ["span [2, 5]"]),
    ):
        with pytest.raises(UsageError) as error:
            attack(Returns(), x, y)
        check(error, words)


def test_schedule_of_a_radius_that_is_not_there(torchattacks):
    with pytest.raises(UsageError) as error:
        TorchAttack("CW").run(Returns(), X, Y, eps_scale=0.5)
    check(error, ["torchattacks.CW has no eps", "eps_schedule", "remove"])
