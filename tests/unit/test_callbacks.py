"""What the callbacks refuse when they are made, with the sentence a newcomer reads."""

import pytest

from robustdist.attacks import PGD, TorchAttack
from robustdist.callbacks import AdversarialTraining, RobustEvaluation
from robustdist.errors import UsageError


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdversarialTraining(PGD()), "pass it as attack="),
        (lambda: AdversarialTraining(attack=PGD), "attack=<class 'robustdist.attacks.pgd.PGD'> is not an instance"),
        (lambda: AdversarialTraining(attack=PGD(targeted=True)), "use an untargeted attack"),
        (lambda: AdversarialTraining(eps_schedule=0.3), "pass LinearRamp"),
        (lambda: AdversarialTraining(precision="16"), "choose inherit, bf16, 32 or auto"),
        (lambda: AdversarialTraining(attack_loss="mse"), "choose ce, margin, dlr or pass a function"),
        (lambda: AdversarialTraining(attack=TorchAttack("PGD"), attack_loss="margin"), "has a loss of its own"),
        (lambda: RobustEvaluation([PGD()]), "must map names to attacks"),
        (lambda: RobustEvaluation({}), "must map names to attacks"),
        (lambda: RobustEvaluation({"clean": PGD()}), "would be logged as another key"),
        (lambda: RobustEvaluation({"a/b": PGD()}), "choose a name without slashes"),
        (lambda: RobustEvaluation({"t": PGD(targeted=True)}), "use an untargeted attack"),
        (lambda: RobustEvaluation(every_n_epochs=0), "every_n_epochs=0 must be at least 1"),
        (lambda: RobustEvaluation(report_dir=__file__), "is a file: choose a folder"),
    ],
)
def test_wrong_arguments_are_refused(make, words):
    with pytest.raises(UsageError) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_attack_loss_does_not_change_the_users_attack():
    attack = PGD()
    assert AdversarialTraining(attack=attack, attack_loss="margin").attack.attack_loss == "margin"
    assert attack.attack_loss == "ce"
