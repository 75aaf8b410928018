"""Batch norms of an averaged copy of a module, estimated anew together with the module's own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from robustdist.core.guard import rewindable_rng
from robustdist.pruning.example import mapped

__all__ = ["AveragedNorms"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class AveragedNorms:
    """Statistics of the averaged weights themselves, as the plain average over the batches that the module sees.

    An average of the module's running statistics is dragged along from before a removal for as long as its decay says,
    and the module's own belong to other weights. So each call of the module whose statistics are kept is repeated on
    the copy, without gradient, with the same dropout; and ``update_parameters`` of the average leaves these norms
    alone until :meth:`close`. Where no such call is seen, because the training step calls several parts with norms one
    after the other, and before the first update of the average, the copy takes the statistics of the module.

    Args:
        module: The module in training.
        average: The average of it, with ``use_buffers=True``; without, torch copies the statistics in every update.
        names: Paths of the norms.
        fresh: Whether to begin from nothing.
    """

    def __init__(self, module: nn.Module, average: AveragedModel, names: Collection[str], *, fresh: bool) -> None:
        self._module, self._average = module, average
        copies = dict(average.module.named_modules())
        self._pairs: list[tuple[Any, Any]] = [(module.get_submodule(name), copies[name]) for name in names]
        self._momenta = [norm.momentum for _, norm in self._pairs]
        self._path = _common_path(names)
        self._counting = [norm.num_batches_tracked for norm, _ in self._pairs]
        self._depth = 0
        self._repeated = False
        self._update = average.update_parameters
        average.update_parameters = self._update_parameters  # type: ignore[method-assign]
        for _, norm in self._pairs:
            norm.momentum = None
            if fresh:
                norm.reset_running_stats()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Repeat calls of the module on the copy; nothing must run compiled, for code that is has no hooks."""
        self._depth = 0
        with ExitStack() as undo:
            for path in self._path:
                part, copied = self._module.get_submodule(path), self._average.module.get_submodule(path)
                before = part.register_forward_pre_hook(
                    lambda _, given, named, copied=copied: self._enter(copied, given, named),
                    prepend=True,
                    with_kwargs=True,
                )
                after = part.register_forward_hook(lambda *_: self._leave(), always_call=True)
                undo.callback(before.remove)
                undo.callback(after.remove)
            yield

    def settle(self) -> None:
        """After a batch: take the module's own statistics, if no call could be repeated."""
        if not self._repeated:
            self.take(_read([norm for norm, _ in self._pairs]))

    def statistics(self) -> list[dict[str, Tensor]]:
        """Return the statistics of the copy's norms."""
        return _read([norm for _, norm in self._pairs])

    @torch.no_grad()
    def take(self, statistics: list[dict[str, Tensor]]) -> None:
        """Take over statistics of norms in this order, such as those of another rank."""
        for (_, norm), values in zip(self._pairs, statistics, strict=True):
            for name, value in values.items():
                getattr(norm, name).copy_(value)

    def close(self) -> None:
        """Let the average go on as before."""
        for (_, norm), momentum in zip(self._pairs, self._momenta, strict=True):
            norm.momentum = momentum
        vars(self._average).pop("update_parameters", None)

    def _enter(self, copied: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or not int(self._average.n_averaged) or not self._is_kept():
            return
        parts = dict(self._average.module.named_modules())
        for name, part in self._module.named_modules():
            parts[name].training = part.training
        like = next(self._average.module.parameters())
        own = next(self._module.parameters())

        def moved(tensor: Tensor) -> Tensor:
            cast = tensor.dtype == own.dtype and tensor.is_floating_point()
            return tensor.to(like.device, like.dtype if cast else tensor.dtype)

        rewind = rewindable_rng(own.device)
        with torch.no_grad():
            copied(*(mapped(value, moved) for value in given), **mapped(dict(named), moved))
        rewind()
        self._repeated = True

    def _leave(self) -> None:
        self._depth -= 1

    def _is_kept(self) -> bool:
        """Whether this call changes the statistics; an attack puts other buffers in their place meanwhile."""
        return any(
            norm.training and norm.num_batches_tracked is own
            for (norm, _), own in zip(self._pairs, self._counting, strict=True)
        )

    def _update_parameters(self, model: nn.Module) -> None:
        kept = self.statistics() if self._repeated else None
        self._update(model)
        if kept is None:
            self.settle()
        else:
            self.take(kept)


def _read(norms: list[Any]) -> list[dict[str, Tensor]]:
    return [{name: getattr(norm, name).clone() for name in _STATISTICS} for norm in norms]


def _common_path(names: Collection[str]) -> list[str]:
    """The module itself and every part of it that holds all of ``names``, from outside in."""
    common: list[str] = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return [".".join(common[:depth]) for depth in range(len(common) + 1)]
