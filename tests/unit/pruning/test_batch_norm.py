import copy

import torch
from torch import nn

from robustdist.pruning.batch_norm import BatchNormRecalibration

BATCHES = torch.randn(6, 16, 3, generator=torch.Generator().manual_seed(0)) * 3 + 1


def net():
    return nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False))


def test_statistics_become_the_plain_average_of_some_batches():
    module, recalibration = net(), BatchNormRecalibration(4)
    module(BATCHES[5])
    old = copy.deepcopy(module.state_dict())
    recalibration.start()
    # a validation in between sees the old statistics, not none
    assert all(torch.equal(old[name], value) for name, value in module.state_dict().items())
    for batch in BATCHES[:4]:
        recalibration.before_batch(module)
        module(batch)
        recalibration.count(module)
    assert torch.allclose(module[0].running_mean, BATCHES[:4].mean((0, 1)), atol=1e-6)
    assert torch.allclose(module[0].running_var, BATCHES[:4].var(1).mean(0), atol=1e-5)
    assert module[0].momentum == 0.1
    assert torch.equal(module[1].running_mean, old["1.running_mean"])
    before = module[0].running_mean.clone()
    recalibration.before_batch(module)
    module(BATCHES[4])
    assert torch.allclose(module[0].running_mean, 0.9 * before + 0.1 * BATCHES[4].mean(0), atol=1e-6)


def test_it_goes_on_in_a_resumed_training_and_ends_with_a_shorter_one():
    module, recalibration = net(), BatchNormRecalibration(4)
    recalibration.start()
    recalibration.before_batch(module)
    module(BATCHES[0])
    recalibration.count(module)
    again, resumed = net(), BatchNormRecalibration(4)
    again.load_state_dict(module.state_dict())
    resumed.load_state_dict(recalibration.state_dict())
    resumed.attach(again)
    resumed.before_batch(again)
    again(BATCHES[1])
    assert torch.allclose(again[0].running_mean, BATCHES[:2].mean((0, 1)), atol=1e-6)
    resumed.detach(again)
    assert again[0].momentum == 0.1


def test_zero_batches_leave_all_as_it_is():
    module, recalibration = net(), BatchNormRecalibration(0)
    recalibration.start()
    recalibration.before_batch(module)
    assert module[0].momentum == 0.1
