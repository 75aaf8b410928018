"""Gradients travel in planned groups: no layer is cut, replicas stay equal, a resumed run has the plan."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest

from robustdist.comm import Identity, Int8, Sign
from robustdist.core.testing import toy_images
from tests.integration.support import Classifier, identical, run, shares
from tests.integration.test_compressed_ddp import Odd, compressed

GROUPS = [
    ["net.layers.4.0.weight", "net.layers.4.0.bias", "net.layers.3.0.weight", "net.layers.3.0.bias"],
    [f"net.layers.{layer}.0.{kind}" for layer in (2, 1, 0) for kind in ("weight", "bias")] + ["net.gain"],
]


def outcome(trainer, module):
    strategy = trainer.strategy
    return module.state_dict(), strategy._route.router.sent, strategy._route.router.join, strategy.comm_stats()


class Times(pl.Callback):
    """Keeps what the strategy tells of the last step, while there is an engine."""

    def on_train_end(self, trainer, module):
        self.times = trainer.strategy.bucket_times()


def fit(folder, strategy, *, epochs=4, collect=outcome, **options):
    options = {"enable_checkpointing": True, "use_distributed_sampler": False, **options}
    data = shares(*toy_images(48), 8)
    options = {"processes": 2, "max_epochs": epochs, "collect": collect, **options}
    return run(folder, Classifier(Odd()), data, strategy=strategy, **options)


def test_given_groups(tmp_path):
    def collect(trainer, module):
        (times,) = [callback.times for callback in trainer.callbacks if isinstance(callback, Times)]
        return module.state_dict(), trainer.strategy._route.router.sent, times

    results = fit(tmp_path, compressed(Sign(), groups=GROUPS), callbacks=[Times()], collect=collect)
    assert identical(results[0][0], results[1][0])
    for _, sent, times in results:
        assert [set(names) for names in sent] == [set(names) for names in GROUPS]
        assert [set(group.names) for group in times] == [set(names) for names in GROUPS]
        assert all(group.exposed >= 0 for group in times)


def test_planned_groups_never_cut_a_layer_and_are_the_same_on_all_ranks(tmp_path):
    results = fit(tmp_path, compressed(Int8(), groups="auto"))
    assert identical(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    sent = results[0][1]
    assert results[0][2]
    assert sorted(name for names in sent for name in names) == sorted(Classifier(Odd()).state_dict())
    for layer in range(5):
        pair = {f"net.layers.{layer}.0.weight", f"net.layers.{layer}.0.bias"}
        assert sum(bool(pair & set(names)) for names in sent) == 1


def test_a_resumed_run_has_the_plan(tmp_path):
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
    options = {"groups": "auto", "collective": "chunked", "residuals": "per_rank"}
    whole = fit(tmp_path, compressed(Sign(), **options), callbacks=[saving])
    resumed = fit(tmp_path, compressed(Sign(), **options), ckpt_path=tmp_path / "saved" / "epoch=2.ckpt")
    assert identical(whole[0][0], resumed[0][0])
    assert whole[0][1] == resumed[0][1]


def test_float32_keeps_the_buckets_of_ddp(tmp_path):
    results = fit(tmp_path, compressed(Identity(), groups="auto"))
    assert identical(results[0][0], results[1][0])
    assert not results[0][2]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["net.layers.9.weight"]], "groups: 'net.layers.9.weight' is no parameter of the module"),
        ([["net.gain"], ["net.gain"]], "groups: 'net.gain' is in two groups"),
    ],
)
def test_wrong_groups(tmp_path, groups, message):
    with pytest.raises(Exception, match=message):
        fit(tmp_path, compressed(Int8(), groups=groups))
