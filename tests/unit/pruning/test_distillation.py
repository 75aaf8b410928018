"""The mixed loss against plain probabilities, its ends, and its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from robustdist.errors import UsageError
from robustdist.pruning.distillation import check_distillation, distilled


def logits(seed: int, *shape: int) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 7)])
def test_against_probabilities(shape):
    student, teacher, task = logits(0, *shape), logits(1, *shape), torch.tensor(1.7).double()
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)
    expected = 0.8 * 1.7 + 0.2 * 9 * (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(distilled(task, student, teacher, weight=0.2, temperature=3), expected)


def test_ends():
    student, teacher, task = logits(0, 5, 4), logits(1, 5, 4), torch.tensor(2.0).double()
    divergence = F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
    torch.testing.assert_close(distilled(task, student, teacher, weight=0.5, temperature=2), 1.0 + 2 * divergence)
    assert distilled(task, student, teacher, weight=0.0, temperature=2) == 2.0
    assert distilled(task, student, student + 5, weight=1.0, temperature=2).abs() < 1e-12


def test_only_the_student_learns_and_large_logits_stay_finite():
    student, teacher = ((300 * logits(seed, 5, 4)).half().requires_grad_() for seed in (0, 1))
    loss = distilled(torch.zeros(()), student, teacher, weight=0.5, temperature=2)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad).all()
    assert teacher.grad is None


def test_the_size_of_the_gradient_does_not_fall_with_the_temperature():
    norms = []
    for temperature in (20.0, 200.0):
        student = (0.1 * logits(0, 5, 4)).requires_grad_()
        distilled(torch.zeros(()).double(), student, logits(1, 5, 4), weight=0.5, temperature=temperature).backward()
        norms.append(student.grad.norm().item())
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


def test_wrong_input_is_named():
    with pytest.raises(UsageError, match=r"student's logits have shape \(5, 4\), the teacher's \(5, 3\)"):
        distilled(torch.zeros(()), logits(0, 5, 4), logits(0, 5, 3), weight=0.5, temperature=2)
    for weight, temperature, message in (
        (1.5, 2.0, r"distill=1\.5 is out"),
        (0.5, 0.0, "distill_temperature=0.0 must"),
    ):
        with pytest.raises(UsageError, match=message):
            check_distillation(weight, temperature)
