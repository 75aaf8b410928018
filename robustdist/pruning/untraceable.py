"""Which parts of a model a trace cannot follow, and the model with these parts cut off from autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

from torch import Tensor, nn

from robustdist.pruning.example import mapped, tensors_in
from robustdist.pruning.projections import join

__all__ = ["covers", "cut_off", "untraceable_parts"]


def untraceable_parts(
    module: nn.Module,
    run: Callable[[], object],
    trace: Callable[[nn.Module, Callable[[], object]], object],
    error: type[Exception],
) -> tuple[list[str], bool]:
    """Return the smallest parts of ``module`` that cannot be traced, and whether the model runs at all.

    A part counts if a trace of it alone, on what it is given in the whole, fails, and that of none of its own parts
    does; where all parts of something count, that stands for them. If the model does not run, it is the innermost part
    that was entered and not left.

    Args:
        module: A model whose trace fails.
        run: Calls it once.
        trace: Traces a part, given a function that calls it.
        error: What the trace fails with.

    Returns:
        Paths, none if no part can be told from the whole.
    """
    calls: dict[str, Callable[[], object]] = {}
    entered: list[str] = []

    def enter(path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(path)
        given, named = mapped(args, Tensor.detach), mapped(kwargs, Tensor.detach)
        calls.setdefault(path, lambda: part(*given, **named))

    handles: list[Any] = []
    for path, part in module.named_modules():
        hook = lambda part, args, kwargs, path=path: enter(path, part, args, kwargs)  # noqa: E731
        handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
        handles.append(part.register_forward_hook(lambda *_: entered.pop() and None))
    try:
        run()
    except Exception:  # whatever the model cannot do with this example
        return [path for path in entered[-1:] if path], False
    finally:
        for handle in handles:
            handle.remove()

    def parts(path: str) -> Iterator[str]:
        """Yield what is called below ``path``, next to it, and has something to learn."""
        for name, child in module.get_submodule(path).named_children():
            if join(path, name) not in calls:
                yield from parts(join(path, name))
            elif next(child.parameters(), None) is not None:
                yield join(path, name)

    def fails(path: str) -> bool:
        try:
            trace(module.get_submodule(path), calls[path])
        except error:
            return True
        return False

    def smallest(path: str) -> list[str]:
        inside = list(parts(path))
        failing = [part for part in inside if fails(part)]
        found = [small for part in failing for small in smallest(part)] or [path]
        return [path] if path and len(inside) > 1 and found == inside else found

    return [path for path in smallest("") if path], True


def covers(patterns: Iterable[str], path: str) -> bool:
    """Return whether one of ``patterns``, as in file names, matches ``path`` or something it is in."""
    names = path.split(".")
    outer = [".".join(names[:count]) for count in range(1, len(names) + 1)]
    return any(fnmatch(name, pattern) for pattern in patterns for name in outer)


@contextmanager
def cut_off(module: nn.Module, paths: Sequence[str]) -> Iterator[list[Tensor]]:
    """Let parts of ``module`` return tensors without a history.

    Yields:
        What the parts were given, filled by a forward pass: further outputs of what is left.
    """
    given: list[Tensor] = []

    def leaves(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        given.extend(tensors_in([args, kwargs]))
        return mapped(out, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))

    handles = [module.get_submodule(path).register_forward_hook(leaves, with_kwargs=True) for path in paths]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()
