"""What the integration tests of the evaluation share: grey images whose verdicts need no attack to be known."""

from __future__ import annotations

import torch
from torch import nn

from robustdist.attacks import PGD
from robustdist.callbacks import RobustEvaluation

from .support import Classifier

GREY = [(0.9, 1), (0.1, 1), (0.55, 1), (0.1, 0), (0.9, 0), (0.45, 0), (0.2, 0), (0.58, 1)]
RADIUS = 0.1


class Threshold(nn.Module):
    """Says 1 for images brighter than a half."""

    def forward(self, x):
        brightness = x.flatten(1).mean(1) - 0.5
        return 10 * torch.stack([-brightness, brightness], dim=1)


def grey(rows):
    values = torch.tensor([value for value, _ in rows])
    return values.view(-1, 1, 1, 1).expand(-1, 1, 3, 3).clone(), torch.tensor([label for _, label in rows])


def expected(rows):
    clean = [(value > 0.5) == bool(label) for value, label in rows]
    robust = [right and abs(value - 0.5) > RADIUS for right, (value, _) in zip(clean, rows, strict=True)]
    return {"num_samples": len(rows), "num_clean": sum(clean), "num_robust": sum(robust)}


def counts(trainer, module):
    result = trainer.callbacks[0].result
    return {name: getattr(result, name) for name in ("num_samples", "num_clean", "num_robust")}


def evaluate(launch, *loaders, collect=counts, attacks=None, verb="validate", processes=2, net=None, **options):
    ours = {key: options.pop(key) for key in ("max_samples", "every_n_epochs", "num_examples") if key in options}
    evaluation = RobustEvaluation(attacks or {"pgd": PGD(eps=RADIUS, steps=3)}, **ours)
    module = Classifier(net if net is not None else Threshold())
    return launch(module, *loaders, verb=verb, collect=collect, processes=processes, callbacks=[evaluation], **options)


def numbers(trainer, module):
    found = trainer.callbacks[0].result.to_dict()
    for attack in found["attacks"].values():
        del attack["seconds"]
    return found
