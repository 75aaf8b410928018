"""Adversarial examples on disk, and their accuracy measured again from there."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robustdist.attacks.pgd import PGD
from robustdist.core.files import write_whole
from robustdist.core.forward import guarded_logits
from robustdist.errors import UsageError
from robustdist.report.result import Check, EvaluationResult, SavedScore

__all__ = [
    "SavedExamples",
    "agrees",
    "from_8bit",
    "load_examples",
    "remeasure",
    "save_examples",
    "save_part",
    "saved_bytes",
    "to_8bit",
]

_LEVELS = 255


class SavedExamples(NamedTuple):
    """One adversarial example per evaluated image, in pixel units.

    The image is the result of the first attack that fooled the model, otherwise of the first attack; an image that is
    wrong without attack stands as it is. So the accuracy on all of them is the robust accuracy.

    Attributes:
        x_adv: Shape (n, ...), float32.
        x_adv_8bit: The same rounded to the nearest of 256 levels of the pixel range, uint8; None without a range.
        loader: Which of several data sets an image is from, shape (n,).
        id: Its place in the data set, shape (n,).
        label: Its true class, shape (n,).
        bounds: Smallest and largest pixel, float64, shape (2,); empty without a range.
    """

    x_adv: Tensor
    x_adv_8bit: Tensor | None
    loader: Tensor
    id: Tensor
    label: Tensor
    bounds: Tensor


def to_8bit(x: Tensor, bounds: Sequence[float]) -> Tensor:
    """Return ``x`` rounded to the nearest of 256 levels between ``bounds``, uint8.

    Example:
        >>> to_8bit(torch.tensor([0.0, 0.25, 1.0]), (0.0, 1.0)).tolist()
        [0, 64, 255]
    """
    low, high = bounds
    return ((x.double() - low) / (high - low) * _LEVELS).round().clamp(0, _LEVELS).to(torch.uint8)


def from_8bit(levels: Tensor, bounds: Sequence[float]) -> Tensor:
    """Return the pixels that 8-bit ``levels`` stand for, float32."""
    low, high = bounds
    return (levels.double() / _LEVELS * (high - low) + low).float()


def saved_bytes(content: Any) -> bytes:
    """Return ``content`` as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def save_part(path: Path, pixels: Tensor, loader: Tensor, ids: Tensor, labels: Tensor) -> None:
    """Write the images of one batch whole, for :func:`save_examples` to collect."""
    named = {"x_adv": pixels.detach().float(), "loader": loader, "id": ids, "label": labels}
    write_whole(path, saved_bytes({name: value.cpu().clone() for name, value in named.items()}))


def save_examples(
    folder: Path,
    parts: Sequence[Path],
    bounds: Sequence[float] | None,
    counted: Iterable[tuple[int, int]] | None = None,
) -> Path:
    """Collect the images of all batches into one file, sorted by loader and id, each image once.

    Args:
        folder: Where ``examples.safetensors`` is written, or ``examples.pt`` without the package safetensors.
        parts: Files of :func:`save_part`; of an image that is in several the last one counts.
        bounds: Smallest and largest pixel; None for inputs without a range, which have no 8-bit version.
        counted: Loader and id of the images to keep, None for all: an earlier run may have attacked more than the
            evaluation counts now.

    Returns:
        The path of the file. It is put together in memory.
    """
    loaded = [torch.load(path, weights_only=True) for path in parts]
    joined = {name: torch.cat([part[name] for part in loaded]) for name in ("x_adv", "loader", "id", "label")}
    places = {key: row for row, key in enumerate(zip(joined["loader"].tolist(), joined["id"].tolist(), strict=True))}
    kept = sorted(places if counted is None else places.keys() & set(counted))
    order = torch.tensor([places[key] for key in kept], dtype=torch.int64)
    content = {name: value[order].contiguous() for name, value in joined.items()}
    content["bounds"] = torch.tensor([] if bounds is None else list(bounds), dtype=torch.float64)
    if bounds is not None:
        content["x_adv_8bit"] = to_8bit(content["x_adv"], bounds)
    if find_spec("safetensors") is None:
        return write_whole(folder / "examples.pt", saved_bytes(content))
    from safetensors.torch import save

    return write_whole(folder / "examples.safetensors", save(content))


def load_examples(path: str | Path) -> SavedExamples:
    """Read a file of :func:`save_examples`; nothing in it is executed.

    Raises:
        UsageError: If there is no such file, it holds something else, or safetensors is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"examples={str(path)!r} does not exist: give the file that --save_examples wrote")
    if path.suffix == ".safetensors":
        if find_spec("safetensors") is None:
            raise UsageError(f"examples={str(path)!r} needs the package safetensors: pip install safetensors")
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            content = load_file(path)
        except SafetensorError as error:
            raise UsageError(f"examples={str(path)!r} is no file of saved examples ({error}): give another") from error
    else:
        try:
            content = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise UsageError(f"examples={str(path)!r} cannot be read ({error}): give another file") from error
    missing = {"x_adv", "loader", "id", "label", "bounds"} - set(content)
    if missing:
        raise UsageError(f"examples={str(path)!r} lacks {', '.join(sorted(missing))}: give a file of --save_examples")
    return SavedExamples(
        content["x_adv"],
        content.get("x_adv_8bit"),
        content["loader"],
        content["id"],
        content["label"],
        content["bounds"],
    )


def remeasure(
    module: nn.Module,
    path: str | Path,
    *,
    forward: Callable[[Tensor], Any] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    batch_size: int = 128,
    measure: bool = True,
) -> SavedScore:
    """Measure the accuracy on saved adversarial examples: as saved in float32, and rounded to 8 bit.

    Args:
        module: The module to judge; it stays as it was.
        path: File of :func:`save_examples`.
        forward: Maps inputs to logits; default ``module``.
        mean: Per-channel mean, if the module takes normalised inputs.
        std: Per-channel standard deviation, if the module takes normalised inputs.
        dtype: Number format of the module's inputs.
        device: Where the module is.
        batch_size: Images per forward pass.
        measure: False only counts the examples, for a forward pass that cannot be repeated from images alone.

    Raises:
        UsageError: If the file cannot be read.
    """
    saved = load_examples(path)
    units = PGD(eps=0, bounds=None, mean=mean, std=std)

    def count(images: Callable[[slice], Tensor]) -> int:
        right = 0
        for start in range(0, len(saved.label), batch_size):
            part = slice(start, start + batch_size)
            pixels = images(part).to(device)
            x = units.from_pixels(pixels, like=pixels.to(dtype))
            prediction = guarded_logits(module, forward or module, x).argmax(1).cpu()
            right += int((prediction == saved.label[part]).sum())
        return right

    bounds, levels = saved.bounds.tolist(), saved.x_adv_8bit
    if not measure:
        return SavedScore(Path(path).name, len(saved.label), None, None)
    return SavedScore(
        file=Path(path).name,
        num_samples=len(saved.label),
        num_right=count(lambda part: saved.x_adv[part]),
        num_right_8bit=None if levels is None else count(lambda part: from_8bit(levels[part], bounds)),
    )


def agrees(saved: SavedScore, result: EvaluationResult) -> Check:
    """Judge whether saved examples give the robust accuracy that the evaluation counted, image for image."""
    if saved.num_right is None:
        return Check(None, f"{saved.file}: the forward function reads the rest of a batch, which is not saved")
    return Check(
        (saved.num_right, saved.num_samples) == (result.num_robust, result.num_samples),
        f"{saved.file}: {saved.num_right} of {saved.num_samples} right when measured again, the evaluation counted "
        f"{result.num_robust} of {result.num_samples}",
    )
