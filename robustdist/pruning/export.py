"""A trained module as ONNX or as an exported program, for any batch size, compared with the module itself."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from robustdist.core.files import write_whole
from robustdist.errors import UsageError
from robustdist.pruning.example import mapped, num_rows, tensors_in, with_rows
from robustdist.pruning.spare import undisturbed

__all__ = ["ExportFormat", "Exported", "export_module"]

ExportFormat: TypeAlias = Literal["onnx", "torch_export"]
_OTHER_ROWS = 5


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The file.
        difference: Largest difference to the outputs of the module.
        num_bytes: Size of the file.
    """

    path: Path
    difference: float
    num_bytes: int


def export_module(
    module: nn.Module,
    example: Any,
    path: str | Path,
    *,
    format: ExportFormat,
    tolerance: float = 1e-4,
) -> Exported:
    """Write ``module`` in eval mode to a file, once the outputs of what is written are those of the module.

    The first dimension of the inputs is free; so are the others of integer inputs, such as the length of token ids,
    where the model lets them. Compared are a batch of the size of ``example`` and one of five samples.

    Args:
        module: A module on the CPU; its mode is put back.
        example: What its forward is called with, at least two samples: a tensor, entries by parameter name, or a
            sequence of positional arguments.
        path: File to write, whole or not at all.
        format: ``onnx`` (checked in onnxruntime) or ``torch_export`` (checked after loading it again).
        tolerance: Largest allowed difference, of outputs up to 1; of larger ones relative to the largest.

    Raises:
        UsageError: If packages are missing, the module cannot be exported with a free batch size, or it differs.
    """
    place = Path(path)
    if not place.parent.is_dir():
        raise UsageError(f"{format}={str(path)!r}: the folder {str(place.parent)!r} does not exist, create it")
    args, kwargs = _arguments(example)
    training = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with undisturbed(), torch.no_grad():
            content, run = _MAKERS[format](module, args, kwargs)
            inputs = [(args, kwargs), with_rows((args, kwargs), _OTHER_ROWS)]
            difference = max(_difference(module, run, *arguments) for arguments in inputs)
    finally:
        for part, was in training:
            part.training = was
    if not difference <= tolerance:  # NaN too
        raise UsageError(
            f"{format}: outputs differ from those of {type(module).__name__} by {difference:.2e}, more than "
            f"{tolerance:g}; nothing was written: look for operations that depend on random numbers or on the batch"
        )
    write_whole(place, content)
    return Exported(place, difference, len(content))


Run: TypeAlias = Callable[[tuple[Tensor, ...], dict[str, Tensor]], list[Tensor]]


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (list, tuple)) else (example,)), {}


def _program(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The exported program, its batch size free."""
    batch = torch.export.Dim("batch", min=1)
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    rows = num_rows((args, kwargs))
    if rows < 2:
        raise UsageError("export needs an example of two samples at least, or the batch size 1 would be built in")

    def free(tensor: Tensor) -> dict[int, Any]:
        lengths = () if tensor.is_floating_point() else range(1, tensor.dim())
        dims: dict[int, Any] = dict.fromkeys(lengths, torch.export.Dim.AUTO)
        return {0: batch, **dims} if tensor.dim() and len(tensor) == rows else dims

    shapes = {name: mapped(value, free, lambda _: None) for name, value in bound.items()}
    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        # whatever torch.export cannot follow, or a batch size that the model fixes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise UsageError(
            f"{type(module).__name__} cannot be exported for any batch size ({type(error).__name__}: {reason[:300]}): "
            "keep Python decisions about values out of forward, or name with forward the part that can be exported"
        ) from error


def _torch_export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, Run]:
    buffer = io.BytesIO()
    torch.export.save(_program(module, args, kwargs), buffer)
    content = buffer.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    return content, lambda args, kwargs: tensors_in(loaded(*args, **kwargs))


def _onnx(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, Run]:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(f"export to ONNX needs another package ({error}): pip install 'robustdist[export]'") from error
    program = _program(module, args, kwargs)
    exported = torch.onnx.export(program, args, kwargs=kwargs, dynamo=True, verbose=False, optimize=True)
    assert exported is not None
    content = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> list[Tensor]:
        values = tensors_in([list(args), kwargs])
        names = [entry.name for entry in session.get_inputs()]
        feed = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, feed)]

    return content, run


_MAKERS: dict[ExportFormat, Callable[..., tuple[bytes, Run]]] = {"onnx": _onnx, "torch_export": _torch_export}


def _difference(module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    expected, found = tensors_in(module(*args, **kwargs)), run(args, kwargs)
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in found]:
        return float("inf")
    largest = 0.0
    for own, other in zip(expected, found, strict=True):
        scale = max(1.0, float(own.abs().max())) if own.numel() else 1.0
        difference = float((own.double() - other.double()).abs().max()) if own.numel() else 0.0
        largest = max(largest, difference / scale) if difference == difference else float("inf")
    return largest
