"""Gate gradients by sample: against backward passes of single samples, in and out of a fit."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from robustdist.attacks import FGSM
from robustdist.callbacks import AdversarialTraining, StructuredPruning
from robustdist.errors import UsageError
from robustdist.objectives import PGDAT
from robustdist.pruning.groups import Member, UnitGroup
from robustdist.pruning.importance import gate_gradient, named_tensors
from robustdist.pruning.sample_gates import SampleGates
from robustdist.pruning.transformers import transformer_groups
from tests.integration.pruning_support import Module, loader, pruning, trainer_of
from tests.unit.pruning.stacks import Block, HomeMade, HomeMadeModel, randomised
from tests.unit.pruning.written_groups import conv_groups, conv_net

IDS = torch.randint(20, (24, 7), generator=torch.Generator().manual_seed(0))
OPTIONS = {"method_options": {"per_sample": True}, "report": False}


def words():
    return randomised(HomeMadeModel([Block(HomeMade()) for _ in range(2)]))


def by_sample(net, groups, x, y):
    """The gradient that each sample alone has, through the weights: rows per group."""
    rows = []
    for one, label in zip(x, y, strict=True):
        net.zero_grad()
        F.cross_entropy(net(one[None]), label[None]).backward()
        rows.append([gate_gradient(group, named_tensors(net)) for group in groups])
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def conv_case():
    x = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    return conv_net().double().eval(), conv_groups(), x


def attention_case():
    net = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).double()
    net = nn.Sequential(net, nn.Flatten(), nn.Linear(24, 3)).double()
    return net, transformer_groups(net), torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1)).double()


def shared_case():
    """A layer that reads something else too."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    group = UnitGroup("0", "channels", 2, (Member("2.weight", 1, torch.tensor([1, -1, 0]), "consumer"),))
    return net, [group], torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double()


def words_case():
    net = words().double().eval()
    return net, transformer_groups(net), IDS[:5]


@pytest.mark.parametrize("case", [conv_case, shared_case, attention_case, words_case])
def test_rows_are_the_gradients_of_single_samples(case):
    net, groups, x = case()
    y = torch.arange(5) % 3
    expected = by_sample(net, groups, x, y)
    gates = SampleGates(net, groups).install()
    for part in (slice(5), slice(2)):  # a smaller batch may follow
        net.zero_grad()
        (F.cross_entropy(net(x[part]), y[part]) + F.cross_entropy(net(x[part]), y[part])).backward()
        found = gates.take(len(y[part]))
        for group, rows in zip(groups, expected, strict=True):
            torch.testing.assert_close(len(y[part]) * found[group.name], 2 * rows[part], rtol=1e-6, atol=1e-12)
    plain = net(x)
    gates.remove()
    assert torch.equal(net(x), plain)
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_backward_passes_of_attacks_and_forward_passes_alone_leave_nothing():
    net, groups, x = conv_case()
    with_gates = SampleGates(net, groups).install()
    x.requires_grad_()
    torch.autograd.grad(net(x).sum(), x)
    with torch.no_grad():
        net(x)
    assert with_gates.take(5) == {}


class Words(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = words().double()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def forward(self, ids):
        return self.net(ids)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Check(Callback):
    """After three steps of 2 batches each, at a learning rate of 0: the mean over all samples so far."""

    def __init__(self, criterion_of):
        self.criterion_of = criterion_of

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != 3 or hasattr(self, "done"):
            return
        self.done = True
        net = words().double()
        groups = transformer_groups(net)
        rows = by_sample(net, groups, IDS, IDS[:, 0] % 5)
        criterion = self.criterion_of.criterion
        for group, expected in zip(groups, rows, strict=True):
            found = criterion.score(UnitGroup(f"net.{group.name}", group.kind, group.size, ()), {})
            torch.testing.assert_close(found, (expected**2).mean(0), rtol=1e-6, atol=1e-15)

    def on_train_end(self, trainer, pl_module):
        assert self.done


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fit_takes_the_mean_square_over_samples_of_batches_and_ranks(tmp_path, ranks):
    callback = StructuredPruning({"width": 0.5}, schedule={"start": 0.9}, round_to=1, **OPTIONS)
    data = DataLoader(TensorDataset(IDS, IDS[:, 0] % 5), 4 // ranks, shuffle=False)
    check = Check(callback)
    options = {"strategy": "robust_ddp_fork", "devices": 2} if ranks == 2 else {}
    trainer = trainer_of(
        tmp_path, [callback, check], max_epochs=2, accumulate_grad_batches=2, precision="64-true", **options
    )
    trainer.fit(Words(), data)


def test_attacked_training_in_mixed_precision(tmp_path):
    module = Module()
    callbacks = [AdversarialTraining(PGDAT(), FGSM(eps=0.1)), pruning(**OPTIONS)]
    trainer_of(tmp_path, callbacks, precision="bf16-mixed").fit(module, loader())
    assert module.net.conv1.out_channels == 4


def test_rows_that_are_no_samples_are_refused(tmp_path):
    class Folded(Module):
        def forward(self, x):
            return self.net(x.flatten(0, 1)[:, None]).unflatten(0, x.shape[:2]).mean(1)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0].expand(-1, 2, -1, -1)), batch[1])

    with pytest.raises(UsageError, match=r"is called with 16 rows for 8 samples.*leave per_sample out"):
        trainer_of(tmp_path, [pruning(**OPTIONS)]).fit(Folded(), loader())
    net = conv_net()
    layers = UnitGroup("layers", "layers", 1, (), layers=("conv1",))
    with pytest.raises(UsageError, match="knows nothing of whole layers"):
        SampleGates(net, [layers])
    net.conv1.compile(backend="eager")
    with pytest.raises(UsageError, match="does not go with compiled parts"):
        SampleGates(net, conv_groups())
