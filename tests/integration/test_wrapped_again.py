"""DDP wraps a module again in the middle of a fit, as it has to when parameters were cut: nothing kept is lost."""

from __future__ import annotations

import gc

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robustdist.comm import DGC, EF21, Identity, PowerSGD, Sign, TopK
from robustdist.core.testing import toy_images
from robustdist.optim import OneBitAdam
from tests.integration.support import Classifier, identical, largest_difference, run, shares
from tests.integration.test_compressed_ddp import Odd, compressed
from tests.integration.test_conservation import Summing, outcome

#: Rows of the first layer that stay.
KEPT = torch.tensor([0, 2, 3, 7, *range(20, 48)])


class WrapAgain(pl.Callback):
    """Replaces the wrapper before the fourth step, and says how often it was replaced."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 3:
            strategy = trainer.strategy
            self.change(trainer, module)
            strategy.model = module
            gc.collect()
            strategy.configure_ddp()

    def change(self, trainer, module):
        """Leave the module as it is."""


class Cut(WrapAgain):
    """Keeps some rows of the first layer, and the columns of the second one that they lead to.

    What is kept of the third one is dropped, and what was delivered of it so far does not count.
    """

    def __init__(self, maps=True):
        self.maps = maps

    def change(self, trainer, module):
        first, second = module.first, module.second

        def slices(name, x):
            if name == "third.weight":
                return None
            return x[KEPT] if name.startswith("first") else x[:, KEPT] if name == "second.weight" else x

        if self.maps:
            trainer.strategy.map_residuals(slices)
        first.weight, first.bias = nn.Parameter(first.weight[KEPT]), nn.Parameter(first.bias[KEPT])
        second.weight = nn.Parameter(second.weight[:, KEPT])
        trainer.optimizers[0].param_groups[0]["params"] = list(module.parameters())
        module.delivered = {name: slices(name, x) if x.dim() > 1 else x for name, x in module.delivered.items()}
        module.delivered |= {"first.bias": module.delivered["first.bias"][KEPT], "third.weight": 0.0}


class Wide(Summing):
    """Gradients do not depend on what was delivered, since weights stay."""

    def __init__(self):
        super().__init__()
        del self.nets
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(36, 64), nn.Linear(64, 40), nn.Linear(40, 4)

    def training_step(self, batch, batch_idx):
        hidden = torch.tanh(self.first(batch[0].flatten(1)))
        return F.cross_entropy(self.third(torch.tanh(self.second(hidden))), batch[1])

    def load_state_dict(self, *args, **options):
        """Leave the module of the process that started the others as it is: its parameters were not cut."""


def fit(folder, module, codec, callbacks=(), collect=None, **options):
    extra = {} if collect is None else {"collect": collect}
    return run(
        folder, module, shares(*toy_images(96), 8), processes=2, strategy=compressed(codec, **options),
        callbacks=callbacks, use_distributed_sampler=False, **extra,
    )  # fmt: skip


@pytest.mark.parametrize("codec", [Sign(), DGC(0.1), EF21(TopK(0.1)), PowerSGD(2)], ids=repr)
def test_a_training_goes_on_as_if_nothing_had_been(tmp_path, codec):
    """With a single bucket, whose parameters DDP puts into another order, gathered payloads say the same."""
    expected = fit(tmp_path, Classifier(Odd()), codec, bucket_cap_mb=25)
    ours = fit(tmp_path, Classifier(Odd()), codec, callbacks=[WrapAgain()], bucket_cap_mb=25)
    assert identical(ours[0], ours[1])
    # factors are products, whose last bits depend on where in a bucket they are
    assert largest_difference(ours[0], expected[0]) <= (1e-6 if isinstance(codec, PowerSGD) else 0.0)


def test_momenta_are_averaged_on(tmp_path):
    class Trained(Classifier):
        def configure_optimizers(self):
            return OneBitAdam(self.named_parameters(), lr=0.01, freeze_step=2)

    expected = fit(tmp_path, Trained(Odd()), Sign())
    ours = fit(tmp_path, Trained(Odd()), Sign(), callbacks=[WrapAgain()])
    assert identical(ours[0], ours[1])
    assert identical(ours[0], expected[0])


@pytest.mark.parametrize("collective", ["chunked", "gather"])
def test_nothing_is_lost_of_what_stays_when_parameters_are_cut(tmp_path, collective):
    options = {"callbacks": [Cut()], "collect": outcome}
    expected, _ = fit(tmp_path, Wide(), Identity(), **options)[0]
    delivered, kept = fit(tmp_path, Wide(), Sign(), collective=collective, **options)[0]
    assert delivered.keys() == expected.keys()
    for name, total in expected.items():
        left = kept[name].double().view(total.shape) if name in kept else torch.zeros_like(total)
        assert float((delivered[name] + left - total).norm()) < 1e-5 * float(total.norm()), name
        if name.endswith("weight"):
            assert float(left.norm()) > 1e-3 * float(total.norm())


def test_what_is_kept_has_to_be_cut_too(tmp_path):
    with pytest.raises(Exception, match=r"first.weight has 1152 elements, .* keeps of it has 2304: call map_residuals"):
        fit(tmp_path, Wide(), Sign(), callbacks=[Cut(maps=False)])
