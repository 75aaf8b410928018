"""OneBitAdam under the Trainer: replicas stay equal, gradients stop to travel, resumed runs are exact."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from robustdist.comm import BF16, Identity
from robustdist.core.testing import toy_images
from robustdist.optim import OneBitAdam
from tests.integration.support import Classifier, identical, run, shares
from tests.integration.test_comm_state import amp
from tests.integration.test_compressed_ddp import Odd, compressed


class OneBit(Classifier):
    def configure_optimizers(self):
        return OneBitAdam(self.named_parameters(), lr=0.003, freeze_step=6)


def weights_and_stats(trainer, module):
    return module.state_dict(), trainer.strategy.comm_stats()


def fit(folder, strategy, epochs, *, module=None, **options):
    options = {"collect": weights_and_stats, "enable_checkpointing": True, "use_distributed_sampler": False, **options}
    data = shares(*toy_images(48), 8)
    return run(folder, module or OneBit(Odd()), data, strategy=strategy, processes=2, max_epochs=epochs, **options)


def test_momenta_travel_instead_of_gradients(tmp_path):
    warm_up = fit(tmp_path, compressed(Identity()), 2)[0][1]
    (first, stats), (second, _) = fit(tmp_path, compressed(Identity()), 6, accumulate_grad_batches=1)
    assert identical(first, second)
    assert warm_up["steps"] == 6
    assert stats["steps"] == 18
    sent, dense = stats["bytes_sent"] - warm_up["bytes_sent"], stats["bytes_dense"] - warm_up["bytes_dense"]
    assert dense / sent > 10


def test_in_warm_up_it_is_adam(tmp_path):
    class Plain(Classifier):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.003)

    (ours, _), _ = fit(tmp_path, compressed(Identity()), 2)
    (expected, _), _ = fit(tmp_path, compressed(Identity()), 2, module=Plain(Odd()))
    assert identical(ours, expected)


@pytest.mark.parametrize("interrupted", [1, 3])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, interrupted):
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
    options = {"collective": "chunked", "residuals": "per_rank"}
    whole = fit(tmp_path, compressed(BF16(), **options), 6, callbacks=[saving])
    path = tmp_path / "saved" / f"epoch={interrupted - 1}.ckpt"
    resumed = fit(tmp_path, compressed(BF16(), **options), 6, ckpt_path=path)
    assert identical(whole[0][0], resumed[0][0])
    assert identical(resumed[0][0], resumed[1][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, "OneBitAdam and gradient_clip_val exclude each other"),
        ({"plugins": [amp()]}, "OneBitAdam and precision='16-mixed' exclude each other"),
    ],
)
def test_what_would_make_ranks_differ_is_refused(tmp_path, options, message):
    with pytest.raises(Exception, match=message):
        fit(tmp_path, compressed(Identity()), 1, **options)
