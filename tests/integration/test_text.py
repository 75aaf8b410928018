"""Embedding-space training and evaluation of an unmodified Hugging Face module, against plain torch."""

from __future__ import annotations

import json
from collections.abc import Iterator

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from robustdist.attacks import APGD, Embeddings, LinearRamp, TokenPGD
from robustdist.callbacks import AdversarialTraining, CatastrophicOverfittingGuard, RobustEvaluation
from robustdist.errors import UsageError
from robustdist.objectives import AWP, DAT, MART, PGDAT, TRADES, FreeLB
from tests.bert import CLS, SEP, TextClassifier, texts, tiny_bert

from .support import Memory, Shares, identical, largest_difference, make_trainer

EPS, ALPHA, STEPS = 0.3, 0.2, 2
SMALL = 0.03  # leaves some of the answers of a random model as they are
LENGTHS = [3, 7, 10, 5, 4, 9, 8, 6]


@pytest.fixture(autouse=True)
def transformers_installed(require):
    require("transformers")


def rows(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    batch = texts([LENGTHS[row % len(LENGTHS)] for row in range(count)], 10, seed)
    return [{key: value[row] for key, value in batch.items()} for row in range(count)]


def collated(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def loader(count: int, seed: int = 0, batch_size: int = 8) -> DataLoader:
    return DataLoader(rows(count, seed), batch_size=batch_size)


def training(objective=None, **options) -> AdversarialTraining:
    attack = TokenPGD(eps=EPS, step_size=ALPHA, steps=STEPS, random_start=False)
    return AdversarialTraining(objective, attack, space=Embeddings(), **options)


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


# --- naive references, through Hugging Face's inputs_embeds


def logits_at(model: nn.Module, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return model(inputs_embeds=x, attention_mask=batch["attention_mask"]).logits


def naive_attack(
    model: nn.Module, batch: dict[str, Tensor], frozen: tuple[int, ...] = (), eps: float = EPS, alpha: float = ALPHA
) -> Tensor:
    """Return the perturbation: normalised ascent of every real token in its own ball."""
    mask = batch["attention_mask"].bool()
    for token in frozen:
        mask &= batch["input_ids"] != token
    x = model.get_input_embeddings().weight[batch["input_ids"]].detach()
    unit = x.norm(dim=2, keepdim=True)
    delta = torch.zeros_like(x)
    for _ in range(STEPS):
        leaf = (x + delta).requires_grad_()
        loss = F.cross_entropy(logits_at(model, leaf, batch), batch["labels"], reduction="sum")
        grad = torch.autograd.grad(loss, leaf)[0] * mask[..., None]
        delta = delta + alpha * unit * grad / grad.norm(dim=2, keepdim=True).clamp(min=1e-20)
        delta = delta * (eps * unit / delta.norm(dim=2, keepdim=True).clamp(min=1e-20)).clamp(max=1)
    return delta


def naive_training(model: nn.Module, batches: Iterator[dict[str, Tensor]], clean_weight: float, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for batch in batches:
        delta = naive_attack(model, batch)
        x = F.embedding(batch["input_ids"], model.get_input_embeddings().weight, padding_idx=0)
        loss = F.cross_entropy(logits_at(model, x + delta, batch), batch["labels"])
        if clean_weight:
            loss = loss + clean_weight * F.cross_entropy(logits_at(model, x, batch), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# --- training


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "clean_weight"), [(PGDAT(), 0.0), (DAT(0.5), 0.5)], ids=["PGDAT", "DAT"])
def test_training_equals_the_loop_written_here(launch, objective, clean_weight):
    module = TextClassifier()
    reference = tiny_bert().double()
    naive_training(reference, iter(loader(24)), clean_weight, module.lr)
    callback = training(objective)
    (trained,) = launch(module, loader(24), callbacks=[callback], precision="64-true")
    expected = {f"model.{name}": value for name, value in reference.state_dict().items()}
    assert largest_difference(trained, expected) < 1e-9
    assert largest_difference(trained, TextClassifier().double().state_dict()) > 1e-3
    assert hooks(module) == 0


@pytest.mark.slow
def test_two_processes_train_as_one(launch):
    samples = rows(32)
    expected = tiny_bert().double()
    naive_training(expected, iter(DataLoader(samples, batch_size=16)), 0.0, 0.1)
    shared = DataLoader(samples, batch_size=8, sampler=Shares(32, 8))
    results = launch(
        TextClassifier(),
        shared,
        callbacks=[training()],
        processes=2,
        use_distributed_sampler=False,
        precision="64-true",
    )
    assert identical(*results)
    reference = {f"model.{name}": value for name, value in expected.state_dict().items()}
    assert largest_difference(results[0], reference) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("objective", [FreeLB(2), TRADES(), MART(), AWP(FreeLB(2))], ids=repr)
def test_other_objectives_work_in_this_space(launch, objective):
    module, log = TextClassifier(dropout=0.1), Memory()
    attack = TokenPGD(eps=EPS, steps=STEPS)
    callback = AdversarialTraining(objective, attack, space=Embeddings(), eps_schedule=LinearRamp(0.5))
    (trained,) = launch(module, loader(24), callbacks=[callback], logger=log, log_every_n_steps=1)
    assert all(bool(torch.isfinite(value).all()) for value in trained.values())
    assert largest_difference(trained, TextClassifier(dropout=0.1).state_dict()) > 1e-4
    assert log.values("robust/eps") == sorted(log.values("robust/eps"))
    assert log.values("robust/eps")[-1] == pytest.approx(EPS)
    assert len(log.values("train_loss")) == 3  # the further passes of an objective are muted
    assert all(part.training for part in module.modules())
    assert hooks(module) == 0


@pytest.mark.slow
def test_a_forward_of_the_users_choice_and_frozen_tokens(launch):
    """The part and the layer are named; [CLS] and [SEP] stay as they are."""
    seen: list[Tensor] = []

    class Watched(TextClassifier):
        def training_step(self, batch, batch_idx):
            handle = self.model.bert.embeddings.word_embeddings.register_forward_hook(
                lambda layer, args, output: seen.append((output - layer.weight[args[0]]).detach())
            )
            try:
                return self.model(**batch).loss
            finally:
                handle.remove()

    space = Embeddings("model.bert.embeddings.word_embeddings", frozen_ids=[CLS, SEP])
    attack = TokenPGD(eps=EPS, step_size=ALPHA, steps=STEPS, random_start=False)
    callback = AdversarialTraining(attack=attack, space=space, forward="model")
    batch = collated(rows(8))
    expected = naive_attack(tiny_bert(), batch, (CLS, SEP))
    launch(Watched(), loader(8), callbacks=[callback])
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-5)
    still = (batch["attention_mask"] == 0) | (batch["input_ids"] == CLS) | (batch["input_ids"] == SEP)
    # the hook of the test ran after ours: rounding of a sum that is taken apart again, and exactly nothing elsewhere
    assert bool((seen[0][still] == 0).all())
    assert float(seen[0][~still].abs().max()) > 0.05


@pytest.mark.slow
def test_the_checkpoint_loads_strictly_into_the_plain_module(tmp_path):
    trainer = make_trainer(callbacks=[training()], default_root_dir=tmp_path)
    module = TextClassifier()
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(tmp_path / "trained.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "trained.ckpt", weights_only=True)["state_dict"]
    fresh = TextClassifier(seed=1)
    fresh.load_state_dict(saved, strict=True)
    assert identical(fresh.state_dict(), module.state_dict())


@pytest.mark.slow
def test_an_exception_in_the_step_leaves_no_hook(launch):
    class Fails(TextClassifier):
        def training_step(self, batch, batch_idx):
            self.model(**batch)
            raise ArithmeticError("the step fails on purpose")

    module = Fails()
    with pytest.raises(ArithmeticError):
        launch(module, loader(8), callbacks=[training()])
    assert hooks(module) == 0
    assert "training_step" not in vars(module)


def test_token_ids_without_a_space_are_refused_with_the_remedy(launch):
    with pytest.raises(UsageError, match=r"no floating-point tensor to attack.*space.*Embeddings"):
        launch(TextClassifier(), loader(8), callbacks=[AdversarialTraining(attack=TokenPGD())])


def test_a_space_is_checked_at_construction():
    with pytest.raises(UsageError, match="space='embeddings' is not an instance of robustdist's Space"):
        AdversarialTraining(space="embeddings")
    with pytest.raises(UsageError, match="space='embeddings' is not an instance of robustdist's Space"):
        RobustEvaluation(space="embeddings")


# --- evaluation


class Pops(TextClassifier):
    """Takes its batch apart, as many steps do."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        labels = batch.pop("labels")
        batch["input_ids"].zero_()
        labels.zero_()

    validation_step = test_step


def evaluation(**options) -> RobustEvaluation:
    attack = TokenPGD(eps=SMALL, step_size=SMALL, steps=STEPS, random_start=options.pop("random_start", False))
    return RobustEvaluation({"token": attack}, space=Embeddings(), **options)


def by_hand(batches: list[dict[str, Tensor]]) -> tuple[int, int]:
    model = tiny_bert().eval()
    clean = robust = 0
    for batch in batches:
        right = model(batch["input_ids"], batch["attention_mask"]).logits.argmax(1) == batch["labels"]
        x = model.get_input_embeddings().weight[batch["input_ids"]].detach() + naive_attack(
            model, batch, (), SMALL, SMALL
        )
        held = logits_at(model, x, batch).argmax(1) == batch["labels"]
        clean, robust = clean + int(right.sum()), robust + int((right & held).sum())
    return clean, robust


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["validate", "test"])
def test_accuracy_per_loader_equals_the_loop_written_here(tmp_path, verb):
    loaders = [loader(20, seed) for seed in range(3)]
    expected = [by_hand(list(each)) for each in loaders]
    assert len({robust for _, robust in expected}) > 1
    callback = evaluation(report_dir=str(tmp_path / "report"))
    trainer = make_trainer(callbacks=[callback])
    module = Pops(dropout=0.5)
    (logged, *_) = getattr(trainer, verb)(module, loaders, verbose=False)
    result = callback.result
    assert [(score.num_clean, score.num_robust) for score in result.loaders] == expected
    assert (result.num_samples, result.num_clean, result.num_robust) == (60, *map(sum, zip(*expected, strict=True)))
    assert logged["robust/acc"] == pytest.approx(result.robust_acc)
    for place, (_, robust) in enumerate(expected):
        assert logged[f"robust/loader{place}_acc"] == pytest.approx(robust / 20)
    assert logged["robust/worst_loader_acc"] == pytest.approx(min(robust for _, robust in expected) / 20)
    for check in ("budget", "gradient", "logits", "deterministic", "zero_radius"):
        assert result.checks[check].passed, result.checks[check].detail
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [entry["num_robust"] for entry in report["loaders"]] == [robust for _, robust in expected]
    assert (tmp_path / "report" / "report.html").is_file()
    assert callback.examples is None
    assert hooks(module) == 0


@pytest.mark.slow
def test_the_result_does_not_depend_on_batches_and_processes(launch):
    def judge(batch_size: int, processes: int = 1) -> list[tuple[int, int]]:
        callback = evaluation(random_start=True)
        results = launch(
            TextClassifier(),
            [loader(21, seed, batch_size) for seed in range(2)],
            verb="test",
            callbacks=[callback],
            processes=processes,
            collect=lambda *_: [(score.num_samples, score.num_robust) for score in callback.result.loaders],
        )
        assert all(result == results[0] for result in results)
        return results[0]

    expected = judge(8)
    assert [count for count, _ in expected] == [21, 21]
    assert judge(5) == expected
    assert judge(4, processes=2) == expected


@pytest.mark.slow
def test_evaluation_in_fit_can_be_monitored(tmp_path):
    """The worst loader as the monitor of a checkpoint, while the model is trained in the same space."""
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, monitor="robust/worst_loader_acc", mode="max")
    callback = evaluation()
    trainer = make_trainer(
        callbacks=[training(), callback, checkpoint], enable_checkpointing=True, max_epochs=2, num_sanity_val_steps=1
    )
    trainer.fit(TextClassifier(), loader(16), [loader(8, 1), loader(8, 2)])
    assert len(callback.history) == 2
    assert checkpoint.best_model_score is not None


@pytest.mark.slow
def test_an_attack_that_drops_broken_rows_keeps_the_batch_together(launch):
    """APGD leaves rows out where it can; the ids of a sentence batch have all rows."""
    attack = APGD(norm="l2", bounds=None, eps=1.0, steps=3)
    callback = AdversarialTraining(attack=attack, space=Embeddings())
    (trained,) = launch(TextClassifier(), loader(8), callbacks=[callback])
    assert all(bool(torch.isfinite(value).all()) for value in trained.values())


def test_the_guard_says_that_it_keeps_images(launch):
    with pytest.raises(UsageError, match="CatastrophicOverfittingGuard keeps input tensors, but space=Embeddings"):
        launch(TextClassifier(), loader(8), callbacks=[training(), CatastrophicOverfittingGuard()])


def test_one_loader_has_no_worst(tmp_path):
    callback = evaluation()
    (logged,) = make_trainer(callbacks=[callback]).test(TextClassifier(), loader(8), verbose=False)
    assert "robust/acc" in logged
    assert not [key for key in logged if "loader" in key]
