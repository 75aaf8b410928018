"""What is attacked: the input tensor of a batch, or the output of an embedding layer."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robustdist.core.batch import BatchAdapter, Key
from robustdist.core.forward import Forward, as_logits, bind_forward, captured_logits
from robustdist.core.guard import ordinary_tensors, pure
from robustdist.errors import UsageError

__all__ = ["Embeddings", "Pixels", "Space", "View"]


class View(ABC):
    """One batch as a space sees it: ``view(x)`` maps a point of the space to the model's output.

    Attributes:
        x: The clean point, shape (batch, ...), without a graph.
        y: The targets.
        path: Where in the batch that lies which ``x`` is made of.
        target_path: Where the targets lie.
        mask: Which tokens an attack may move, shape (batch, tokens); None where all of ``x`` may move.
        rowwise: Whether ``view(x[rows])`` makes sense, because the output reads nothing but the given rows.
    """

    x: Tensor
    y: Any
    path: tuple[Key, ...]
    target_path: tuple[Key, ...]
    mask: Tensor | None = None
    rowwise: bool = True

    @abstractmethod
    def __call__(self, x: Tensor) -> Any:
        """Return the output of the attacked part of the model at ``x``, with a graph."""

    @abstractmethod
    def at(self, x: Tensor) -> AbstractContextManager[Any]:
        """Give the batch to run a step on: inside the context that step works at the point ``x``."""

    @abstractmethod
    def captured(self, x: Tensor) -> AbstractContextManager[list[Tensor]]:
        """Collect the logits that the attacked part returns at the point ``x`` while a step runs in the context."""


class Space(ABC):
    """Base of what can be attacked; a space holds settings, a view one batch."""

    #: Whether a point of the space is something to look at.
    has_pictures = False

    @abstractmethod
    def kept(self, batch: Any, adapter: BatchAdapter) -> Any:
        """Return a batch that stays as it is when a step takes ``batch`` apart or writes into its tensors."""

    @abstractmethod
    def view(self, module: nn.Module, batch: Any, adapter: BatchAdapter | None = None, forward: Forward = None) -> View:
        """Return ``batch`` as a point of this space.

        Args:
            module: The user's module; left as it was.
            batch: Any batch that ``adapter`` understands.
            adapter: Finds input and target; default ``BatchAdapter()``.
            forward: What gives the logits: None for the module, the path of a sub-module, or a function
                (module, x, batch).

        Raises:
            UsageError: If the batch or the module does not fit.
        """


class Pixels(Space):
    """The input tensor itself, as the batch holds it."""

    has_pictures = True

    def kept(self, batch: Any, adapter: BatchAdapter) -> Any:
        """Return the batch with copies of input and target."""
        _, _, input_path, target_path = adapter.locate(batch)
        return adapter.copied(batch, input_path, target_path)

    def view(self, module: nn.Module, batch: Any, adapter: BatchAdapter | None = None, forward: Forward = None) -> View:
        """Return the batch's input and the module that takes it; arguments as in :meth:`Space.view`."""
        return _PixelView(module, batch, adapter or BatchAdapter(), forward)


class _PixelView(View):
    def __init__(self, module: nn.Module, batch: Any, adapter: BatchAdapter, forward: Forward) -> None:
        self.x, self.y, self.path, self.target_path = adapter.locate(batch)
        # a function may read other entries of the batch, which have all rows
        self.rowwise = not callable(forward)
        self._module, self._batch, self._adapter, self._forward = module, batch, adapter, forward
        self._function = bind_forward(module, forward, batch)
        self._given: Tensor | None = None

    def __call__(self, x: Tensor) -> Any:
        return self._function(x.clone())

    @contextmanager
    def at(self, x: Tensor) -> Iterator[Any]:
        # a step may write into its batch, and the next pass needs what was there
        self._given = x.clone()
        try:
            yield self._adapter.copied(self._adapter.replace(self._batch, self._given), self.target_path)
        finally:
            self._given = None

    def captured(self, x: Tensor) -> AbstractContextManager[list[Tensor]]:
        def is_point(value: Any) -> bool:
            # what a step has written into is another point
            return value is x or (isinstance(value, Tensor) and value is self._given and value._version == 0)

        return captured_logits(self._module, self._forward, is_point)


class Embeddings(Space):
    r"""The output of an embedding layer, for models whose batch holds token ids.

    While an attack or a step works at a point :math:`x'`, a forward hook adds :math:`x' - x` to what the layer returns
    for the batch's own ids; :math:`x` is what it returned for them in eval mode. The ids stay as they are, gradients
    reach :math:`x'` and, in the outer loss, the layer's weights. Calls of the layer on other ids (an augmented copy,
    say) are left alone; a pass in which the layer meets the batch's ids not once is an error. Between two passes the
    module carries no hook.

    Without a function as ``forward`` the attacked part is called as its signature asks: with the batch's entries of
    the same names, the targets left out, or, if it does not name ``ids_key``, with the batch as its one argument.

    Tokens that an attack must not move: those whose ``mask_key`` entry is 0 (with ``mask_key=None``, those whose id is
    the layer's ``padding_idx``) and those with an id in ``frozen_ids``.

    Args:
        layer: Path of the layer in the module, for example "model.bert.embeddings.word_embeddings", or "auto" for what
            ``get_input_embeddings()`` of the Hugging Face model inside returns.
        ids_key: Key, attribute or position of the token ids in the batch; a path such as "text.input_ids" reaches into
            nested batches.
        mask_key: The same for the attention mask of shape (batch, tokens); None for batches without one.
        frozen_ids: Ids of tokens that stay as they are, for example those of [CLS] and [SEP].

    References:
        Miyato et al., "Adversarial Training Methods for Semi-Supervised Text Classification" (the idea).
        Zhu et al., "FreeLB: Enhanced Adversarial Training for Natural Language Understanding".

    Example:
        >>> class Bag(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.words = nn.Embedding(5, 3, padding_idx=0)
        ...
        ...     def forward(self, input_ids):
        ...         return self.words(input_ids).sum(1)
        >>> model, batch = Bag(), {"input_ids": torch.tensor([[1, 2], [3, 0]]), "labels": torch.tensor([0, 1])}
        >>> view = Embeddings("words", mask_key=None).view(model, batch)
        >>> view.x.shape, view.mask.tolist()
        (torch.Size([2, 2, 3]), [[True, True], [True, False]])
        >>> torch.allclose(view(view.x + 1), model(batch["input_ids"]) + torch.tensor([[2.0], [1.0]]))
        True
    """

    def __init__(
        self,
        layer: str = "auto",
        ids_key: str | int = "input_ids",
        mask_key: str | int | None = "attention_mask",
        frozen_ids: Sequence[int] = (),
    ) -> None:
        self.layer = layer
        self.ids_key = ids_key
        self.mask_key = mask_key
        self.frozen_ids = tuple(frozen_ids)

    def kept(self, batch: Any, adapter: BatchAdapter) -> Any:
        """Return the batch with copies of ids, mask and target."""
        ids_path, _ = adapter.entry(batch, self.ids_key, "ids_key")
        target_path, _ = adapter.target(batch, ids_path)
        paths = [ids_path, target_path]
        if self.mask_key is not None:
            paths.append(adapter.entry(batch, self.mask_key, "mask_key")[0])
        return adapter.copied(batch, *paths)

    def view(self, module: nn.Module, batch: Any, adapter: BatchAdapter | None = None, forward: Forward = None) -> View:
        """Return the clean embeddings of the batch; arguments as in :meth:`Space.view`.

        Raises:
            UsageError: If the layer, the ids or the targets are not found, or do not fit each other.
        """
        # the graph of an attack keeps ids and mask: nothing of it may be made in inference mode, nor stay as made there
        with torch.inference_mode(False):
            return self._view(module, ordinary_tensors(batch), adapter or BatchAdapter(), forward)

    def _view(self, module: nn.Module, batch: Any, adapter: BatchAdapter, forward: Forward) -> View:
        layer = self._layer(module)
        ids_path, ids = adapter.entry(batch, self.ids_key, "ids_key")
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
            found = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise UsageError(f"ids_key={self.ids_key!r} is {found}, not token ids of shape (batch, tokens): name them")
        target_path, y = adapter.target(batch, ids_path)
        x = self._embedded(module, layer, ids)
        mask = self._mask(batch, adapter, ids, getattr(layer, "padding_idx", None))
        call = _Call(module, forward, batch, ids_path, target_path)
        return _EmbeddingView(self, layer, batch, ids_path, ids, x, y, mask, call)

    def _embedded(self, module: nn.Module, layer: nn.Module, ids: Tensor) -> Tensor:
        with pure(module, "eval", ids.device, 0), torch.no_grad():
            try:
                x = layer(ids)
            except (RuntimeError, TypeError, IndexError) as error:
                raise UsageError(f"layer={self.layer!r} cannot embed the ids ({error}): name another layer") from error
        if not isinstance(x, Tensor) or x.shape[:-1] != ids.shape:
            raise UsageError(
                f"layer={self.layer!r} does not return one tensor of shape (batch, tokens, hidden): name an embedding"
            )
        return x

    def _layer(self, module: nn.Module) -> nn.Module:
        if self.layer != "auto":
            try:
                return module.get_submodule(self.layer)
            except AttributeError:
                children = ", ".join(name for name, _ in module.named_children())
                raise UsageError(
                    f"layer={self.layer!r} is no sub-module of {type(module).__name__}: it has {children}"
                ) from None
        layers = {id(layer): layer for layer in map(_input_embeddings, module.modules()) if layer is not None}
        if len(layers) == 1:
            return layers.popitem()[1]
        named = dict(module.named_modules())
        names = [name for name, part in named.items() if id(part) in layers]
        names = names or [name for name, part in named.items() if isinstance(part, nn.Embedding)]
        raise UsageError(
            f"layer='auto' finds {len(layers)} input embeddings in {type(module).__name__}: "
            f"name the layer to attack{', for example ' if names else ''}{', '.join(map(repr, names[:3]))}"
        )

    def _mask(self, batch: Any, adapter: BatchAdapter, ids: Tensor, padding: int | None) -> Tensor:
        if self.mask_key is not None:
            _, given = adapter.entry(batch, self.mask_key, "mask_key")
            if not isinstance(given, Tensor) or given.shape != ids.shape:
                raise UsageError(
                    f"mask_key={self.mask_key!r} is not a mask of shape {tuple(ids.shape)}, like the ids: name another"
                )
            mask = given != 0
        else:
            mask = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
        return mask & ~torch.isin(ids, ids.new_tensor(self.frozen_ids)) if self.frozen_ids else mask


class _EmbeddingView(View):
    rowwise = False  # the ids have all rows

    def __init__(
        self,
        space: Embeddings,
        layer: nn.Module,
        batch: Any,
        ids_path: tuple[Key, ...],
        ids: Tensor,
        x: Tensor,
        y: Any,
        mask: Tensor,
        call: _Call,
    ) -> None:
        self.x, self.y, self.path, self.mask = x, y, ids_path, mask
        self.target_path = call.target_path
        self._space, self._layer, self._batch, self._ids, self._call = space, layer, batch, ids, call
        self._fixed = ~mask[..., None]
        self._num_perturbed = 0

    def __call__(self, x: Tensor) -> Any:
        with self.at(x):
            return self._call(x)

    @contextmanager
    def at(self, x: Tensor) -> Iterator[Any]:
        before = self._num_perturbed
        # zero also where an attack that knows no mask has put noise
        delta = (x - self.x).masked_fill(self._fixed, 0.0)

        def perturb(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not any(self._are_ids(value) for value in (*args, *kwargs.values())):
                return output
            self._num_perturbed += 1
            return output + delta.to(output.dtype)

        handle = self._layer.register_forward_hook(perturb, with_kwargs=True)
        try:
            yield self._batch
        finally:
            handle.remove()
        if self._num_perturbed == before:
            raise UsageError(
                f"layer={self._space.layer!r} did not meet the ids of the batch (ids_key={self._space.ids_key!r}) in a "
                "forward pass, so nothing was attacked: name the layer and the ids that the model really uses"
            )

    @contextmanager
    def captured(self, x: Tensor) -> Iterator[list[Tensor]]:
        seen: list[Tensor] = []
        if self._call.part is None:
            yield seen
            return
        perturbed = self._num_perturbed

        def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            nonlocal perturbed
            if self._num_perturbed > perturbed and torch.is_grad_enabled():
                perturbed = self._num_perturbed
                seen.append(as_logits(output))

        handle = self._call.part.register_forward_hook(keep)
        try:
            yield seen
        finally:
            handle.remove()

    def _are_ids(self, value: Any) -> bool:
        return value is self._ids or (
            isinstance(value, Tensor) and value.dtype == self._ids.dtype and torch.equal(value, self._ids)
        )


class _Call:
    """Calls the attacked part with what it needs from the batch."""

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        batch: Any,
        ids_path: tuple[Key, ...],
        target_path: tuple[Key, ...],
    ) -> None:
        function = bind_forward(module, forward, batch)
        #: The part whose output is taken; None for a function.
        self.part = function if isinstance(function, nn.Module) else None
        self.target_path = target_path
        self._function = function
        self._args: tuple[Any, ...] = (batch,)
        self._kwargs: dict[str, Any] = {}
        if self.part is not None and isinstance(batch, Mapping):
            parameters = inspect.signature(self.part.forward).parameters.values()
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            names = {parameter.name for parameter in parameters}
            kwargs = {key: batch[key] for key in batch if (key in names or takes_all) and (key,) != target_path}
            if ids_path[0] in kwargs:
                self._args, self._kwargs = (), ordinary_tensors(kwargs)

    def __call__(self, x: Tensor) -> Any:
        return self._function(x) if self.part is None else self._function(*self._args, **self._kwargs)


def _input_embeddings(part: nn.Module) -> nn.Module | None:
    """Return what a Hugging Face model says its input embedding is."""
    getter = getattr(part, "get_input_embeddings", None)
    try:
        found = getter() if callable(getter) else None
    except NotImplementedError:  # models of other inputs than tokens
        return None
    return found if isinstance(found, nn.Module) else None
