"""StructuredPruning of modules whose parts are compiled: the same as without, or refused."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, TensorDataset

from robustdist.errors import UsageError
from robustdist.pruning import discover
from tests.integration.pruning_support import Module, X, loader, pruning, size, trainer_of
from tests.unit.pruning.stacks import Block, HomeMade, HomeMadeModel, randomised


class CallsPart(Module):
    """Compiled in place, as a wrapper, or inside; the step calls the part."""

    def __init__(self, how, **compiling):
        super().__init__()
        if how == "in place":
            self.net.compile(**compiling)
        elif how == "wrapped":
            self.net = torch.compile(self.net, **compiling)
        elif how == "inside":
            self.net.stem = torch.compile(self.net.stem, **compiling)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


def trained(tmp_path, how, callbacks, earlier=0, **compiling):
    torch.compiler.reset()
    pl.seed_everything(0)
    module = CallsPart(how, **compiling)
    if earlier:
        trainer_of(tmp_path, [], max_epochs=earlier).fit(module, loader())
    trainer_of(tmp_path, callbacks).fit(module, loader())
    return module


def assert_equal(module, expected):
    pairs = zip(module.state_dict().values(), expected.state_dict().values(), strict=True)
    assert all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize(
    ("how", "compiling"),
    [
        ("in place", {"backend": "eager", "fullgraph": True}),
        pytest.param("wrapped", {"backend": "aot_eager", "fullgraph": True}, marks=pytest.mark.slow),
        pytest.param("inside", {"backend": "aot_eager"}, marks=pytest.mark.slow),
        pytest.param("in place", {"backend": "aot_eager"}, marks=pytest.mark.slow),
    ],
)
def test_compiled_parts_are_pruned_as_others(tmp_path, how, compiling):
    """Groups found, units masked and cut, a teacher followed, norms of an average estimated anew, all measured."""

    def callbacks():
        return [pruning(distill=0.5, forward="net", bn_recalibration_batches=4), EMAWeightAveraging(decay=0.9)]

    expected = trained(tmp_path, "not", callbacks())
    module = trained(tmp_path, how, callbacks(), **compiling)
    assert size(module) < 0.4 * size(Module())
    assert_equal(module, expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hydra", "l0"])
@pytest.mark.filterwarnings("ignore:method='l0'")  # masks learn little in so few steps
def test_code_compiled_in_an_earlier_fit_gets_the_gates(tmp_path, method):
    options = {"method": method, "report": False}
    expected = trained(tmp_path, "not", [pruning(**options)], earlier=1)
    assert_equal(trained(tmp_path, "in place", [pruning(**options)], earlier=1, backend="eager"), expected)


def test_channels_of_a_compiled_part_are_traced():
    """Compiled code is one step of autograd's graph, in which no layer is seen."""
    torch.compiler.reset()
    groups = discover(CallsPart("wrapped", backend="aot_eager"), X)
    plain = discover(CallsPart("not"), X)
    assert [group.name.replace("_orig_mod.", "") for group in groups] == [group.name for group in plain]
    assert [len(group.members) for group in groups] == [len(group.members) for group in plain]


@pytest.mark.filterwarnings("ignore:removal='never' with hidden")
def test_code_compiled_in_an_earlier_fit_gets_norms_over_survivors(tmp_path):
    class Words(Module):
        def __init__(self, compiled):
            super().__init__()
            self.net = randomised(HomeMadeModel([Block(HomeMade())])).train()
            if compiled:
                self.net.compile(backend="eager")

    ids = torch.randint(20, (32, 7), generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(ids, ids[:, 0] % 5), 8)
    modules = []
    for compiled in (False, True):
        torch.compiler.reset()
        modules.append(Words(compiled))
        trainer_of(tmp_path, [], max_epochs=1).fit(modules[-1], data)
        callback = pruning(method="magnitude", schedule={"start": 0.25}, kinds=["hidden"], removal="never")
        trainer_of(tmp_path, [callback]).fit(modules[-1], data)
    assert_equal(*modules)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["taylor", "hydra"])
def test_code_compiled_in_an_earlier_fit_gets_gates_on_layers_and_skips_them(tmp_path, method):
    ids = torch.randint(20, (32, 7), generator=torch.Generator().manual_seed(0))
    data, modules = DataLoader(TensorDataset(ids, ids[:, 0] % 5), 8), []
    for compiled in (False, True):
        torch.compiler.reset()
        modules.append(Module())
        modules[-1].net = randomised(HomeMadeModel([Block(HomeMade()) for _ in range(4)])).train()
        if compiled:
            modules[-1].net.compile(backend="eager")
        trainer_of(tmp_path, [], max_epochs=1).fit(modules[-1], data)
        callback = pruning(target={"layers": 2}, method=method, report=False)
        trainer_of(tmp_path, [callback], max_epochs=4).fit(modules[-1], data)
    assert modules[0].pruning_recipe.dropped_layers == modules[1].pruning_recipe.dropped_layers
    assert_equal(*modules)


def test_methods_compiled_on_the_module_are_refused(tmp_path):
    with pytest.raises(UsageError, match="methods of the module were compiled, which stay with the original"):
        trainer_of(tmp_path, [pruning()]).fit(torch.compile(Module(), backend="eager"), loader())
    module = Module()
    module.net.forward = torch.compile(module.net.forward, backend="eager")
    with pytest.raises(UsageError, match="methods of its part 'net' were compiled"):
        trainer_of(tmp_path, [pruning()]).fit(module, loader())
