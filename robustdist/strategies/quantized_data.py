"""Processes send each other samples in a few bits instead of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from robustdist._lightning import DDPStrategy, LightningModule
from robustdist.comm.cost import dense_bytes
from robustdist.comm.importance import Score
from robustdist.comm.sample_exchange import SampleExchange
from robustdist.comm.samples import SampleQuantizer
from robustdist.core.batch import BatchAdapter, Key
from robustdist.core.forward import Forward
from robustdist.core.guard import forked_rng
from robustdist.core.ranks import gathered
from robustdist.core.redirect import StepInterceptor, check_step_can_be_intercepted
from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError
from robustdist.strategies.gradient_difference import GradientDifference
from robustdist.strategies.replicas import check_digests, make_equal, replica_digest
from robustdist.strategies.sample_union import Select, Selection, UnionBatch, joined
from robustdist.types import Number, check_count

__all__ = ["QuantizedDataStrategy"]

#: Where a checkpoint keeps the number of the next batch.
KEY = "robustdist.quantized_data"


class QuantizedDataStrategy(DDPStrategy):
    r"""Trains n replicas on the union of their batches, which travel as codes; no gradient is sent.

    Each process draws its batch as under DDP, quantises it, and gets the codes of all others. Every process then takes
    the step on the same n-fold batch, so that all compute the same gradient

    .. math:: g = \frac{1}{nB} \sum_{i=1}^n \sum_{j=1}^B \nabla \ell(w; \hat x_{ij}, y_{ij})

    and the replicas stay equal. Bytes follow the size of a batch instead of that of the model; computation per process
    is n-fold. Inside ``training_step`` the global random streams follow (seed, batch) and are the same on all.

    Also known to the Trainer as ``strategy="ddp_quantized_data"``, with ``_fork`` and ``_spawn`` as for DDP.

    Args:
        bits: Bits per component of the input, 1 to 8.
        bounds: Smallest and largest value of a floating-point input, in its own units.
        dither: Round at random, without bias.
        num_classes: Number of classes, for labels in as few bits as they need; None sends targets as they are.
        select: "all" sends every sample. "top" sends those with the highest scores, each counting once: biased, towards
            what the model is wrong about. "importance" sends a sample with probability p = min(1, c (s + mean s)), and
            every process repeats it in the union floor(1/p + u) times and scales the loss accordingly: unbiased for
            a loss that is a mean over the samples.
        ratio: Share of each batch to send, with "top" and "importance"; a number or a fraction such as "1/4".
        score: Of a sample: "gradient" is the norm of softmax minus one-hot, "loss" the cross-entropy. Costs a forward
            pass over the own batch.
        forward: What gives the logits for the score: None for the module itself, the path of a sub-module, or a
            function (module, x, batch).
        refine: Also send the difference between the gradients at the own batch and at its codes, in two bits; the
            gradient is then unbiased for any ``bits``. Costs two passes over the own batch.
        check_every: Batches between two comparisons of a hash of all weights; None for never.
        input_key: Key, attribute or position of the input in the batch, when it cannot be told.
        target_key: The same for the target.
        seed: Seed of all draws.
        timeout: Time after which a process that does not answer is given up.
        start_method: How processes are started, as in DDPStrategy.
        process_group_backend: As in DDPStrategy.

    Raises:
        UsageError: If options exclude each other, or in ``fit`` rule the module out; at a batch that does not fit, on
            all processes; if replicas differ.

    References:
        Hanna et al., "Quantizing data for distributed learning".
    """

    #: All processes work on the same batch: whoever draws by rank elsewhere must not here.
    replicated = True

    def __init__(
        self,
        bits: int = 8,
        bounds: Sequence[float] = (0.0, 1.0),
        *,
        dither: bool = True,
        num_classes: int | None = None,
        select: Select = "all",
        ratio: Number = 1.0,
        score: Score = "gradient",
        forward: Forward = None,
        refine: bool = False,
        check_every: int | None = 100,
        input_key: Key | None = None,
        target_key: Key | None = None,
        seed: int = 0,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        process_group_backend: str | None = None,
    ) -> None:
        self.quantizer = SampleQuantizer(bits, bounds, dither=dither, num_classes=num_classes, seed=seed)
        self.selection = Selection(select, ratio, score, forward, seed)
        if refine and select != "all":
            raise UsageError(f"refine=True is about whole batches, and select={select!r} sends parts: set one of them")
        # no option of DistributedDataParallel, which takes no part where no gradient is sent
        super().__init__(timeout=timeout, start_method=start_method, process_group_backend=process_group_backend)
        self.refine, self.seed = refine, seed
        self.check_every = None if check_every is None else check_count(check_every, "check_every")
        self.adapter = BatchAdapter(input_key, target_key, uint8=True)
        self.exchange: SampleExchange | None = None
        self._difference: GradientDifference | None = None
        self._union: UnionBatch | None = None
        self._batches = 0
        self._steps = self._trained = self._refinement_bytes = 0
        self._loaded: Mapping[str, Any] | None = None

    # --- start and end

    def configure_ddp(self) -> None:
        """Make the replicas equal in the place of wrapping the module: no gradient is synchronised."""
        module = self._module()
        self._check_module(module)
        make_equal(module)
        self.exchange = SampleExchange(self.quantizer, self.root_device)
        self._close()
        self._steps = self._trained = self._refinement_bytes = 0
        if self.refine:
            self._difference = GradientDifference(module, self.root_device, seed=self.seed)
        state, self._loaded = self._loaded, None
        if state is not None:
            self._batches = int(state["batches"])

    def on_train_end(self) -> None:
        """Compare the weights once more."""
        super().on_train_end()
        if self.check_every is not None:
            check_digests(gathered(replica_digest(self._module())), self._batches)

    def teardown(self) -> None:
        """End the communication."""
        self._close()
        self._union = None
        super().teardown()

    def _close(self) -> None:
        if self._difference is not None:
            self._refinement_bytes += self._difference.engine.stats.bytes_sent
            self._difference.close()
            self._difference = None

    # --- a step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let go of the union before: it serves one batch, however often its step is run."""
        super().on_train_batch_start(batch, batch_idx)
        self._union = None

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step on the union of the batches of all processes."""
        if self._union is None:
            self._union = self._join(batch)
        union = self._union
        seed = derive_seed(self.seed, "step", self._batches)
        if self._difference is not None:
            step = self._module().training_step
            with self.precision_plugin.train_step_context():
                self._difference.start(
                    lambda one: step(one, *args, **kwargs), batch, union.own, step=self._batches, seed=seed
                )
        with forked_rng(self.root_device, seed):
            output: Any = super().training_step(union.batch, *args, **kwargs)
        if union.factor == 1:
            return output
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] * union.factor}
        return output * union.factor

    def _join(self, batch: Any) -> UnionBatch:
        """Exchange the own batch for the union, and compare weights when it is time to."""
        assert self.exchange is not None
        checks = self.check_every is not None and self._batches % self.check_every == 0
        union = joined(
            batch,
            module=self._module(),
            exchange=self.exchange,
            adapter=self.adapter,
            selection=self.selection,
            context=self.precision_plugin.train_step_context(),
            step=self._batches,
            digest=replica_digest(self._module()) if checks else 0,
        )
        check_digests(union.digests, self._batches)
        self._batches += 1
        return union

    def post_backward(self, closure_loss: Tensor) -> None:
        """Add what the codes lost of the gradient."""
        super().post_backward(closure_loss)
        if self._difference is not None:
            self._difference.finish(1 / self._module().trainer.accumulate_grad_batches)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, and count what DDP would have sent for it."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._steps += 1
        self._trained += sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        return output

    # --- checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save, with the number of the next batch, which the draws follow."""
        checkpoint[KEY] = {"batches": self._batches}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load, and keep the number of the next batch until training starts."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        self._loaded = checkpoint.get(KEY)
        return checkpoint

    # --- figures

    def comm_stats(self) -> dict[str, float]:
        """Return counters since the start of training, of this process.

        ``calls``: batches exchanged; ``steps``: optimiser steps; ``bytes_sent``: bytes sent to other processes;
        ``bytes_dense``: what an all-reduce of float32 gradients would have sent for these steps; ``ratio``: the latter
        over the former; ``wait_seconds``: time spent on exchanging batches, encoding and decoding included.
        """
        sent, calls, seconds = self._refinement_bytes, 0, 0.0
        if self.exchange is not None:
            sent += self.exchange.bytes_sent
            calls, seconds = self.exchange.calls, self.exchange.seconds
        if self._difference is not None:
            sent += self._difference.engine.stats.bytes_sent
        dense = dense_bytes(self._trained, self.world_size)
        return {
            "calls": calls,
            "steps": self._steps,
            "bytes_sent": sent,
            "bytes_dense": dense,
            "ratio": dense / sent if sent else 1.0,
            "wait_seconds": seconds,
        }

    # --- small things

    def _module(self) -> LightningModule:
        module = self.lightning_module
        if module is None:
            raise RuntimeError("the strategy has no module yet")
        return module

    def _check_module(self, module: LightningModule) -> None:
        """Refuse what does not go with replicas on the same batch.

        Raises:
            UsageError: Naming the option and the remedy.
        """
        check_step_can_be_intercepted(self, module, needs_second_pass=False, option=type(self).__name__)
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise UsageError(
                "sync_batchnorm=True has nothing to do where every process normalises over the union of all batches: "
                "leave it out"
            )
        if not module.automatic_optimization and (self.refine or self.selection.select == "importance"):
            option = "refine=True" if self.refine else "select='importance'"
            raise UsageError(
                f"{option} changes the gradient or the loss of the step, which manual optimisation does not allow: "
                "set automatic_optimization=True, or leave it out"
            )
        if self.refine and StepInterceptor.of(self).active:
            raise UsageError(
                "refine=True compares gradients of the ordinary step, which does not go with AdversarialTraining: "
                "set refine=False"
            )
        if self.refine and getattr(self.precision_plugin, "scaler", None) is not None:
            raise UsageError(
                "refine=True adds gradients without loss scale, which does not go with precision='16-mixed': "
                "use 'bf16-mixed', or refine=False"
            )
