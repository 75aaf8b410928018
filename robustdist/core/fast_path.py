"""Cheaper forward passes for an attack that compute the same function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from robustdist.core.compiled import CompiledForward, compiled_part
from robustdist.core.folding import (
    ConvNormPair,
    conv_norm_pairs,
    fixed_norms,
    folded_pair,
    identity,
    input_only_norm,
    is_watched,
)
from robustdist.core.forward import AttackPrecision, precision_context
from robustdist.core.guard import frozen_parameters
from robustdist.core.layout import channels_last_copies
from robustdist.core.stand_ins import StandIns, stand_ins
from robustdist.core.trial import (
    MIN_AGREEMENT,
    FastPathSettings,
    Probe,
    Trial,
    agreement,
    choose,
    combinations,
    compare,
    fold_error,
)
from robustdist.errors import UsageError

__all__ = ["AutoFlag", "AutoPrecision", "FastPath"]

AutoFlag: TypeAlias = bool | Literal["auto"]
AutoPrecision: TypeAlias = AttackPrecision | Literal["auto"]

_Mode: TypeAlias = Literal["eval", "train"]

# Largest difference of logits, over the largest logit, that a fold may make. Rounding makes 1e-6 on a CPU and up to
# 1e-3 on a GPU that multiplies in TF32; a wrong fold of norms that are far from the identity makes 0.1 and more.
_TOLERANCE = 5e-3


class FastPath:
    """Options that make the forward passes of one attack cheaper without changing what they compute.

    The weights do not change during an attack and only the input is differentiated, so the attack may run on copies of
    them in another memory order, in bfloat16, or with batch norm folded in. Inside :meth:`applied` such copies stand
    in for the module's own; parameters, buffers, gradients, modes and hooks are not touched.

    :meth:`prepare` looks at the first batch: it finds what can be folded and checks it, and resolves "auto" by
    measuring. Until it is called, "auto" counts as off and nothing is folded or compiled.

    Args:
        precision: "inherit" (autocast as the caller has it), "bf16", "32" or "auto".
        channels_last: Weights of two-dimensional convolutions in channels-last order; their outputs follow.
        fold_batch_norm: Fold a batch norm that uses its running statistics into the convolution whose output goes
            nowhere else; the other ones get a backward pass for their input alone.
        compile: ``torch.compile`` the forward pass with frozen parameters. For the shape of the first batch; batches of
            another shape, and passes without gradient, run uncompiled.
        part: Path of the sub-module to compile, through which the inputs go; "" for the module itself.

    Attributes:
        chosen: The settings in use.
        trials: What was measured, empty without "auto".
        notes: Sentences on options that could not be used.
        num_folded: Batch norms that a convolution takes in.
        num_norms: Batch norms that use running statistics during the attack; 0 unless they were looked for.

    Raises:
        UsageError: If an option is unknown.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).eval()
        >>> fast_path = FastPath(fold_batch_norm=True)
        >>> fast_path.prepare(model, torch.rand(5, 1, 4, 4))
        >>> with fast_path.applied(model):
        ...     logits = model(torch.rand(5, 1, 4, 4))
        >>> fast_path.num_folded
        1
    """

    trials: list[Trial]
    notes: list[str]
    num_norms: int
    _pairs: list[ConvNormPair]

    def __init__(
        self,
        precision: AutoPrecision = "inherit",
        channels_last: AutoFlag = False,
        fold_batch_norm: AutoFlag = False,
        compile: bool = False,
        part: str = "",
    ) -> None:
        known = (*get_args(AttackPrecision), "auto")
        if precision not in known:
            raise UsageError(f"precision={precision!r} is unknown: choose {', '.join(known[:-1])} or auto")
        for option, value in (("channels_last", channels_last), ("fold_batch_norm", fold_batch_norm)):
            if value not in (True, False, "auto"):
                raise UsageError(f"{option}={value!r} is unknown: choose true, false or auto")
        if not isinstance(compile, bool):
            raise UsageError(f"compile={compile!r} is unknown: choose true or false (auto does not measure it)")
        self.precision = precision
        self.channels_last = channels_last
        self.fold_batch_norm = fold_batch_norm
        self.compile = compile
        self.part = part
        self._compiled: dict[nn.Module, CompiledForward] = {}
        self.forget()

    @property
    def needs_batch(self) -> bool:
        """Whether some option has to see a batch before it can be used, so that :meth:`prepare` is due."""
        return bool(self.fold_batch_norm or self.compile) or "auto" in (self.precision, self.channels_last)

    @property
    def num_folded(self) -> int:
        """Batch norms that a convolution takes in."""
        return len(self._pairs) if self.chosen.fold_batch_norm else 0

    def prepare(
        self,
        module: nn.Module,
        x: Tensor,
        *,
        forward: Callable[[Tensor], Any] | None = None,
        loss: Callable[[Tensor], Tensor] | None = None,
        mode: _Mode = "eval",
    ) -> None:
        """Find out on a real batch what can be used, and resolve "auto".

        Args:
            module: The module under attack, without a distributed wrapper; left as it was.
            x: Inputs of the usual batch size.
            forward: Maps inputs to logits; default ``module``.
            loss: Maps logits to the scalar that the attack differentiates; default cross-entropy of the predictions.
            mode: Mode of ``module`` during the attack.

        Raises:
            UsageError: If the module's weights are sharded, or ``compile`` is asked for and fails.
        """
        self.forget()
        probe = Probe(module, x, module if forward is None else forward, loss, mode)
        if self.channels_last or self.fold_batch_norm or self.compile:
            _check_whole(module)
        candidates = combinations(
            self._precisions(module), self._orders(module), self._folds(probe) if self.fold_batch_norm else [False]
        )
        chosen = candidates[0]
        if len(candidates) > 1:
            self.trials, notes = compare(probe, candidates, lambda way: self._applied(way, module, mode))
            self.notes += notes
            chosen = choose(self.trials)
        self.adopt(chosen.compiled(self.compile))
        if self.compile:
            self._check_compiled(probe)

    def adopt(self, chosen: FastPathSettings) -> None:
        """Use these settings, for example what the first of several processes chose."""
        self.chosen = chosen

    def forget(self) -> None:
        """Forget what :meth:`prepare` found out."""
        self.trials, self.notes, self.num_norms, self._pairs = [], [], 0, []
        self.chosen = FastPathSettings(
            precision="inherit" if self.precision == "auto" else self.precision,
            channels_last=self.channels_last is True,
        )
        self.close()

    def close(self) -> None:
        """Let go of compiled code."""
        self._compiled.clear()

    @contextmanager
    def applied(self, module: nn.Module, mode: _Mode = "eval") -> Iterator[None]:
        """Make forward passes of ``module`` cheap inside the context, at the weights that it has on entry.

        Args:
            module: The module under attack, the one that was prepared.
            mode: The mode in which it will be called; the caller sets it (``Attack.run`` does).

        Raises:
            UsageError: If the module's weights are sharded.
        """
        with self._applied(self.chosen, module, mode):
            yield

    def stand_ins(self, module: nn.Module, mode: _Mode = "eval") -> StandIns:
        """Return what :meth:`applied` puts in the place of the weights of ``module``, for many short uses of it.

        Copies of the weights that the module has now, in the number format of the passes at hand; nothing compiled.

        Raises:
            UsageError: If the module's weights are sharded.
        """
        if self.chosen.needs_whole_weights:
            _check_whole(module)
        with precision_context(self.chosen.precision, _device(module)):
            return self._copies(self.chosen, module, mode)

    def __str__(self) -> str:
        texts = [f"forward passes of the attack: {self.chosen}"]
        if self.chosen.fold_batch_norm:
            texts.append(f"{self.num_folded} of {self.num_norms} batch norms folded into convolutions")
        if self.trials:
            measured = ", ".join(str(trial) for trial in self.trials)
            texts.append(f"measured per gradient, with the share of it whose sign is kept: {measured}")
        return "; ".join([*texts, *self.notes])

    def __getstate__(self) -> dict[str, Any]:
        # compiled code cannot be copied or sent to another process
        return {**vars(self), "_compiled": {}}

    # --- on the first batch

    def _precisions(self, module: nn.Module) -> list[AttackPrecision]:
        if self.precision != "auto":
            return [self.precision]
        device = _device(module)
        at_work = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.bfloat16
        full = all(p.dtype == torch.float32 for p in module.parameters() if p.is_floating_point())
        return ["inherit", "bf16"] if full and not at_work else ["inherit"]

    def _orders(self, module: nn.Module) -> list[bool]:
        if self.channels_last == "auto":
            return [False, True] if channels_last_copies(module, {}) else [False]
        return [self.channels_last]

    def _folds(self, probe: Probe) -> list[bool]:
        """Find pairs and check the fold; return the values that ``fold_batch_norm`` may have."""
        module = probe.module
        reason = ""
        self.num_norms = sum(1 for _ in fixed_norms(module, probe.mode))
        if compiled_part(module) is not None:
            reason = "the module is compiled"
        elif self.num_norms == 0:
            reason = "there is none that uses running statistics"
        else:
            with probe.entered() as run:
                self._pairs = conv_norm_pairs(module, run, probe.mode)
            error = fold_error(probe, lambda way: self._applied(way, module, probe.mode))
            if not error <= _TOLERANCE:  # NaN is no agreement
                reason = f"logits of the first batch would change by {error:.1e} of the largest"
        if reason:
            self.notes.append(f"batch norm is not folded: {reason}")
            self._pairs = []
            return [False]
        return [False, True] if self.fold_batch_norm == "auto" else [True]

    def _check_compiled(self, probe: Probe) -> None:
        if compiled_part(probe.module) is not None:
            raise UsageError("compile=True but the module is compiled already: set compile=False")
        with self._applied(self.chosen.compiled(False), probe.module, probe.mode):
            reference = probe.gradient()
        try:
            with self._applied(self.chosen, probe.module, probe.mode):
                kept = agreement(reference, probe.gradient())
        except RuntimeError as error:
            self.close()
            reason = str(error).strip().partition("\n")[0]
            raise UsageError(f"compile=True failed on this module ({reason}): set compile=False") from error
        if kept < MIN_AGREEMENT:
            self.notes.append(f"nothing is compiled: it keeps the sign of {kept:.1%} of the gradient")
            self.adopt(self.chosen.compiled(False))

    # --- in every attack

    @contextmanager
    def _applied(self, settings: FastPathSettings, module: nn.Module, mode: _Mode) -> Iterator[None]:
        if settings.needs_whole_weights:
            _check_whole(module)
        with ExitStack() as stack:
            stack.enter_context(precision_context(settings.precision, _device(module)))
            if settings.compile:
                part = module.get_submodule(self.part)
                if part not in self._compiled:
                    self._compiled[part] = CompiledForward(part)
                # the compiled backward pass would make gradients of all weights that require one, and drop them
                stack.enter_context(frozen_parameters(module))
                stack.enter_context(stand_ins({(part, "forward"): self._compiled[part]}))
            stack.enter_context(stand_ins(self._copies(settings, module, mode)))
            yield

    def _copies(self, settings: FastPathSettings, module: nn.Module, mode: _Mode) -> dict[tuple[nn.Module, str], Any]:
        values: dict[tuple[nn.Module, str], Any] = {}
        with torch.inference_mode(False), torch.no_grad():
            if settings.fold_batch_norm:
                norms = dict(fixed_norms(module, mode))
                for pair in self._pairs:
                    conv, norm = module.get_submodule(pair.conv), norms.get(pair.norm)
                    # a norm may have been thawed or a hook added since
                    if norm is not None and not (is_watched(conv) or is_watched(norm)):
                        del norms[pair.norm]
                        values[conv, "weight"], values[conv, "bias"] = folded_pair(conv, norm)
                        values[norm, "forward"] = identity
                if not settings.compile:  # a compiler writes such a backward pass by itself
                    values |= {(norm, "forward"): input_only_norm(norm) for norm in norms.values()}
            if settings.channels_last:
                values |= channels_last_copies(module, values)
            device = _device(module)
            if torch.is_autocast_enabled(device.type):
                # autocast keeps its casts of parameters, but would cast these copies anew at every forward pass
                dtype = torch.get_autocast_dtype(device.type)
                for key, value in values.items():
                    if isinstance(value, Tensor) and value.dtype == torch.float32:
                        values[key] = value.to(dtype)
        return values


def _device(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in chain(module.parameters(), module.buffers())), torch.device("cpu"))


def _check_whole(module: nn.Module) -> None:
    sharded = any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
    if sharded or any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        raise UsageError(
            "the weights are sharded over processes, so no copies can be made for the attack: "
            "set channels_last=False, fold_batch_norm=False and compile=False"
        )
