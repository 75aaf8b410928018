"""DDP whose gradients travel as packed codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from robustdist._lightning import LightningModule, Trainer, rank_zero_info
from robustdist.comm import Compressor, Identity
from robustdist.comm.controller import BitController
from robustdist.comm.cost import Collective, dense_bytes
from robustdist.comm.engine import CommEngine
from robustdist.comm.grouping import Group
from robustdist.comm.residual_state import Change, Residuals, check_residuals
from robustdist.errors import UsageError
from robustdist.strategies.auto_codec import given_codec, measured_codec, num_gradients, plain_stats
from robustdist.strategies.bit_control import BitControl
from robustdist.strategies.comm_checkpoint import KEY, change_communication, communication_state, restore_communication
from robustdist.strategies.comm_hook import GradBucket, make_hook
from robustdist.strategies.gradient_route import GradientRoute, Groups, tell_of_end, tell_of_switch
from robustdist.strategies.launchers import FollowsStructure
from robustdist.strategies.momentum_sync import MomentumSync
from robustdist.strategies.refusals import (
    check_codec,
    check_module,
    check_optimizers,
    check_options,
    check_skipped,
    check_trainer,
    check_warmup_of,
    check_wrapped,
    warn_of_gradient,
)
from robustdist.strategies.step_watch import StepWatch

__all__ = ["CompressedDDPStrategy"]


class CompressedDDPStrategy(FollowsStructure):
    r"""Lightning's DDP, with the gradients sent through a codec.

    Each process sends :math:`C(v_i)` with :math:`v_i = g_i + e_i` instead of :math:`g_i`, keeps
    :math:`e_i = v_i - C(v_i)` for the next step, and all decode the same bytes, so replicas stay bit-identical. A
    thread of its own does the work while backward goes on. Module, optimiser, clipping, accumulation and precision are
    used as with DDP; the gradient is compressed once per synchronised step, after accumulation, and clipped after it
    was decoded.

    The Trainer knows it as ``strategy="ddp_compressed"``, ``"ddp_compressed_fork"`` and ``"ddp_compressed_spawn"``.

    Args:
        compressor: A codec of ``robustdist.comm``, or the name of one with its defaults; by default ``QSGD(bits=4)``.
            "auto" measures the link and the codecs when training starts and takes the fastest one that keeps accuracy,
            plain float32 included, which is then left to DDP.
        error_feedback: Add what a codec leaves out to the next gradient. Without it, top-k and few bits lose accuracy.
        sides: 2 compresses the averaged gradient on its way back too, 1 sends it as float32.
        collective: "chunked", "gather", "native", or "auto" for the one that sends fewest bytes.
        bits: Chooses the bits of ``QSGD`` while training runs: ``FixedBits``, ``BitSchedule`` or ``MQGrad``.
        warmup_steps: Optimiser steps at the start whose gradients are averaged uncompressed, as by DDP; steps that a
            scaler skips do not count. Residuals begin at zero after them, and ``bits`` counts its steps from there.
        groups: Which gradients travel together: "ddp" leaves that to DDP, which fills buckets up to ``bucket_cap_mb``;
            "auto" watches five steps and the link and plans groups that keep backward waiting least, without cutting a
            layer; or lists of names of parameters, in the order in which their gradients become ready.
        residuals: What a checkpoint keeps of the error feedback. "reduced": one vector of the size of the model, good
            for any number of processes. "per_rank": all of it, for a continuation that is exact to the bit with the
            same number. "reset": nothing.
        small: Parameters with fewer elements travel uncompressed, together.
        segment: Elements that are encoded while the ones before are on the wire, by default as many as make messages
            of 32 KiB, and 256 Ki or more.
        timeout: Time after which a process that does not answer is given up.
        start_method: How processes are started, as in DDPStrategy.
        **options: Of DDPStrategy and of torch's DistributedDataParallel, such as ``find_unused_parameters``.

    Raises:
        UsageError: If options exclude each other; in ``fit`` if the module or the Trainer rule compression out, or if
            the processes have different settings.
    """

    def __init__(
        self,
        compressor: Compressor | str | None = None,
        *,
        error_feedback: bool = True,
        sides: Literal[1, 2] = 2,
        collective: Collective | Literal["auto"] = "auto",
        bits: BitController | None = None,
        warmup_steps: int = 0,
        groups: Groups = "ddp",
        residuals: Residuals = "reduced",
        small: int = 1024,
        segment: int | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        check_options(options, residuals=residuals, small=small, segment=segment, warmup_steps=warmup_steps)
        if groups != "ddp" and options.get("bucket_cap_mb") is None:
            options["bucket_cap_mb"] = 1  # small parts, which arrive early; the groups put them together
        super().__init__(timeout=timeout, start_method=start_method, **options)
        self.compressor = given_codec(compressor)
        if bits is not None and self.compressor is None:
            raise UsageError("bits and compressor='auto' exclude each other: give compressor=QSGD(), or leave out bits")
        check_codec(self.compressor or Identity(), collective=collective, sides=sides)
        self._bits = None if bits is None or self.compressor is None else BitControl(bits, self.compressor)
        self.residuals: Residuals = residuals
        self._options = options
        self._engine_options: dict[str, Any] = {
            "error_feedback": error_feedback,
            "sides": sides,
            "collective": collective,
            # what DDP discards because no rank used the parameter must not be taken from the residuals
            "dynamic": bool(options.get("find_unused_parameters")),
            "warmup_steps": warmup_steps,
        }
        self._transport: dict[str, Any] = {
            "small": small,
            "segment": segment,
            "timeout": None if timeout is None else timeout.total_seconds(),
        }
        self.engine: CommEngine | None = None
        self._wrapped: LightningModule | None = None
        self._names: dict[int, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._step = 0
        self._steps_before = 0
        self._groups: Groups = groups
        self._route: GradientRoute | None = None
        self._momenta: MomentumSync | None = None
        self._watch = StepWatch(self._keep)
        self._skipped = 0
        self._loaded: Mapping[str, Any] | None = None
        self._final_state: Mapping[str, Any] | None = None
        self._trained: LightningModule | None = None
        self._last_hook: float | None = None
        self._step_wait = self._wait_seconds = 0.0
        self._final_stats = plain_stats(0, 0)
        self._plain_bytes: float | None = None

    # --- start and end

    def setup(self, trainer: Trainer) -> None:
        """Set DDP up, and refuse what cannot work before anything expensive starts."""
        check_trainer(trainer, self._options)
        super().setup(trainer)
        if self.engine is not None:
            check_optimizers(self.optimizers, self.engine.world_size)
            check_warmup_of(self.optimizers, self.engine.warmup_steps)
            self._momenta = MomentumSync.find(self.optimizers, trainer, self._scaler(), self._names, **self._transport)
            if self._momenta is not None and self._bits is not None:
                raise UsageError("bits and OneBitAdam exclude each other, since it has one: leave out bits")
            self._restore(self.engine)
            for optimizer in self.optimizers:
                self._watch.add(optimizer)

    def configure_ddp(self) -> None:
        """Wrap the module, on any kind of device, and start the communication.

        Wrapped again in the middle of a fit, as a module has to be whose parameters were replaced, it goes on with all
        that is kept between steps, by name of the parameter.
        """
        module = self._module()
        check_module(module)
        super().configure_ddp()
        model = self.model
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"{type(self).__name__} needs DistributedDataParallel, not {type(model).__name__}")
        check_wrapped(model)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        if self._wrapped is module:
            self._go_on(module)
        else:
            self._start(module)
        if self.engine is not None:
            model.register_comm_hook(None, make_hook(self._reduce))

    def _go_on(self, module: LightningModule) -> None:
        if self._plain_bytes is not None:
            self._plain_bytes = dense_bytes(num_gradients(module), dist.get_world_size())
        if self.engine is not None:
            check_residuals(self.engine, {name: math.prod(shape) for name, shape in self._shapes.items()})
            self._watch_module(self.engine, module)

    def _start(self, module: LightningModule) -> None:
        self._close()
        self._wrapped = module
        if self._loaded is None and self._trained is module:
            self._loaded = self._final_state
        self._final_state = self._trained = None
        if self._loaded is not None and self._bits is not None and self._loaded["bits"] is not None:
            self._bits.load_state_dict(self._loaded["bits"])
        self._step_wait = self._wait_seconds = 0.0
        codec = self._bits.codec() if self._bits is not None else self.compressor
        codec = codec or measured_codec(module, self.root_device)
        if self.compressor is None and isinstance(codec, Identity):
            # nothing is faster here than what DDP does by itself
            self._plain_bytes = dense_bytes(num_gradients(module), dist.get_world_size())
            return
        self._plain_bytes = None
        self.engine = CommEngine(codec, **self._engine_options, **self._transport)
        if self.engine.world_size == 1:
            rank_zero_info(f"{type(self).__name__}: a single process sends nothing, so nothing is compressed")
        self._watch_module(self.engine, module)

    def _watch_module(self, engine: CommEngine, module: LightningModule) -> None:
        if self._route is not None:
            self._route.close()
        self._route = GradientRoute(self._groups, engine, module, self.root_device, dynamic=engine.dynamic)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes, which would wait for this one until the time-out, and learn who is missing."""
        super().on_exception(exception)
        if self.engine is not None and isinstance(exception, Exception):
            told = self.engine.report(exception)
            if told is not exception:
                exception.args = (f"{exception}\n{told}",)

    def teardown(self) -> None:
        """End the communication, then DDP."""
        self._close()
        self._loaded, self._steps_before = None, 0
        super().teardown()

    def _close(self) -> None:
        self._wrapped = None
        self._watch.close()
        if self.engine is not None:
            self._final_stats = self._stats(self.engine)
            if self._momenta is not None:
                self._momenta.close()
                self._momenta = None
            if self._route is not None:
                self._route.close()
            self.engine.close()
            self.engine = None

    # --- a step

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Hand a bucket to the engine; called by DDP in backward, with buckets in the same order on all ranks."""
        engine, route = self.engine, self._route
        if engine is None or route is None:
            raise RuntimeError("gradients arrived after the communication had ended")
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        grads = dict(zip(names, bucket.gradients(), strict=True))
        engine.scale = self._loss_scale()
        if self._momenta is not None and not self._momenta.wants_gradients:
            # every rank keeps its own gradient
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        bits, first, last = self._active_bits(), bucket.index() == 0, bucket.is_last()
        note = () if bits is None else bits.note()
        future = route.send(grads, bucket.buffer(), step=self._step, note=note, first=first, last=last)
        self._last_hook = perf_counter()
        self._step += last
        return future

    def _active_bits(self) -> BitControl | None:
        """Return the bit controller, if bits are what gradients travel in."""
        return None if self.engine is not None and self.engine.dense else self._bits

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Start the clock of the bit controller: time between two steps, such as a validation, is not computation."""
        bits = self._active_bits()
        if bits is not None:
            bits.begin_step()
        return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Let the bit controller see the loss, and start the clock of the planner."""
        super().pre_backward(closure_loss)
        bits = self._active_bits()
        if bits is not None:
            bits.add_loss(closure_loss)
        if self._route is not None:
            self._route.begin_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Learn of failures, and count how long backward waited for the network after its own work was done."""
        super().post_backward(closure_loss)
        if self.engine is not None:
            self.engine.settle()  # before the optimiser steps on what a failed process has sent
        if self._last_hook is not None:
            self._step_wait = perf_counter() - self._last_hook
            self._wait_seconds += self._step_wait
            self._last_hook = None

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, and put the residuals back if a gradient scaler skipped it; if not, the optimiser's hook kept them."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # of Lightning's wrapper
        if self.engine is None:
            if self._plain_bytes is not None:
                self._final_stats = plain_stats(self._final_stats["steps"] + 1, self._plain_bytes)
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._watch.add(optimizer)
        self._watch.executed = False
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if not self._watch.executed:
            self.engine.rollback(self._stepped_by(optimizer))
            self._skipped += 1
            check_skipped(self._skipped, self._module(), self._loss_scale())
            self._end_step(self.engine)
        return output

    def _keep(self, optimizer: Optimizer) -> None:
        """Make the residuals final of what an optimiser has stepped."""
        if self.engine is not None:
            self._skipped, dense = 0, self.engine.dense
            self.engine.commit(self._stepped_by(optimizer))
            tell_of_switch(self.engine, dense)
            self._end_step(self.engine)

    def _stepped_by(self, optimizer: Any) -> set[str] | None:
        """Return the parameters that an optimiser steps, or None for all."""
        if len(self.optimizers) == 1:
            return None
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return {self._names[id(parameter)] for parameter in parameters if id(parameter) in self._names}

    def _end_step(self, engine: CommEngine) -> None:
        if engine.nonfinite is not None and self._scaler() is None:
            warn_of_gradient(engine.nonfinite)
        engine.nonfinite = None
        if self._bits is not None:
            self._bits.end_step(engine, self._step_wait, executed=self._watch.executed)
        if self._route is not None and self._watch.executed:
            self._route.end_step(self._engine_options["collective"])

    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    def _loss_scale(self) -> float:
        scaler = self._scaler()
        return 1.0 if scaler is None else float(scaler.get_scale())

    # --- checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save, with the state of the communication beside that of the optimisers."""
        if "optimizer_states" in checkpoint:
            state = self._final_state if self.engine is None else self._state(self.engine)
            if state is not None:
                checkpoint[KEY] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load, and keep the state of the communication until there is one."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self._module().trainer.state.fn == "fit":
            self._loaded = checkpoint.get(KEY)
            self._steps_before = checkpoint["global_step"]
            if self.engine is not None:
                # a learning rate finder goes back to where it started, in the middle of a fit
                self.engine.reset()
                self._step = 0
                self._restore(self.engine)
        return checkpoint

    def on_train_end(self) -> None:
        """Keep the state for a checkpoint that is saved, or a fit that goes on, after this one."""
        super().on_train_end()
        if self.engine is not None:
            tell_of_end(self.engine)
            self._final_state, self._trained = self._state(self.engine), self._module()

    def _state(self, engine: CommEngine) -> dict[str, Any]:
        return communication_state(
            engine, self.residuals, self._module(), device=self.root_device, step=self._step,
            route=self._route, bits=self._bits, momenta=self._momenta,
        )  # fmt: skip

    def _restore(self, engine: CommEngine) -> None:
        state, self._loaded = self._loaded, None
        engine.num_steps = self._steps_before
        if state is None:
            return
        self._step = state["step"]
        restore_communication(
            state, engine, self.global_rank, route=self._route, bits=self._bits, momenta=self._momenta
        )

    def map_residuals(self, change: Change) -> None:
        """Change what is kept between steps, for example after parameters were cut and before DDP wraps them again.

        A collective: all processes call it between two steps, and go on as from a "reduced" checkpoint.

        Args:
            change: Takes the name of a parameter and a tensor of the shape it had when DDP wrapped it, for every vector
                kept of it (rows of Q of ``PowerSGD`` as matrices of equal rows); returns the new one, as slicing does,
                or None to forget the parameter. It must do the same on all processes.
        """
        if self.engine is not None:
            self._shapes |= change_communication(
                change, self.engine, self._momenta, self._shapes, device=self.root_device
            )

    # --- figures

    def comm_stats(self) -> dict[str, float]:
        """Return counters since the start of training, of this process.

        ``calls``: buckets; ``steps``: synchronised steps; ``bytes_sent``: payload bytes sent to other processes;
        ``bytes_dense``: what an all-reduce of float32 would have sent; ``ratio``: the latter over the former;
        ``wait_seconds``: how long backward waited for the network after its own work was done.
        """
        return self._final_stats if self.engine is None else self._stats(self.engine)

    def _stats(self, engine: CommEngine) -> dict[str, float]:
        stats = {**engine.comm_stats(), "wait_seconds": self._wait_seconds}
        return stats if self._momenta is None else self._momenta.add_stats(stats)

    def bucket_times(self) -> list[Group]:
        """Return the groups of the last step with the seconds they took and were waited for, on this process."""
        return [] if self.engine is None else self.engine.bucket_times()

    @property
    def chosen_bits(self) -> int | None:
        """Bits that the controller chose for the next step, or None without one or while gradients are float32."""
        bits = self._active_bits()
        return None if bits is None else bits.controller.bits

    # --- small things

    def _module(self) -> LightningModule:
        module = self.lightning_module
        if module is None:
            raise RuntimeError("the strategy has no module yet")
        return module
