"""Samples more of the domains that lag behind, while training runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from robustdist._lightning import Callback, LightningModule, Trainer, rank_zero_warn
from robustdist.callbacks.domain_metrics import DomainMetrics
from robustdist.callbacks.progress import Progress
from robustdist.core.ranks import failing_together, gathered
from robustdist.domains.loaders import DomainIds, DomainLoader, find_domain_ids, with_sampler
from robustdist.domains.mixer import DomainMixer, Method
from robustdist.domains.sampler import DomainSampler
from robustdist.errors import RobustDistWarning, UsageError
from robustdist.types import check_count

__all__ = ["DomainReweighting"]


class DomainReweighting(Callback):
    r"""After every validation, sets how much of each domain the training loader draws.

    The ratios :math:`q_d` are the worst mix near a potential mix :math:`p_d`, for the losses :math:`L_d` that the
    module logs per domain, above references :math:`R_d`:

    .. math::
        \max_q \sum_d q_d (L_d - R_d) \quad\text{with}\quad \tfrac12 \sum_d p_d \Big(\frac{q_d}{p_d} - 1\Big)^2 \le \rho

    kept from starving any domain by floors (:func:`robustdist.domains.worst_mix`). With ``dynamic_reference``,
    :math:`R_d` is the loss that a scaling law through the losses so far predicts for the end of training; with
    ``dynamic_ratio``, :math:`p_d` follows :math:`q_d` between half and twice the mix of the beginning.

    Module and DataModule stay as they are: a :class:`~robustdist.domains.DomainSampler` takes the place of the training
    loader's sampler, also of the one that the Trainer puts in for several processes. An epoch keeps its length. New
    ratios hold from the next sample that is drawn; with ``num_workers`` > 0 the ``num_workers * prefetch_factor``
    batches that wait already are trained on first. Ratios and references are made on one process and the same on all.
    A resumed training gets the samples that the interrupted one would have got.

    Logs ``domains/ratio/<name>``, ``domains/loss/<name>`` and ``domains/reference/<name>``.

    Args:
        method: ``dro``; ``static_dro``, the same with fixed reference and potential mix; ``sheared``, multiplicative
            weights; ``constant``, no change: the mix of the beginning, with the same sampler.
        monitor: Metric of a domain, logged in validation: with {index} and {name} in the place of the domain's number
            and name, as in "robust/loader{index}_acc"; without them, one validation loader per domain is expected, in
            the order of domains, and ``/dataloader_idx_<n>`` appended as Lightning does.
        mode: "min" for losses; "max" for accuracies, of which :math:`L_d = 1 - ` accuracy is taken.
        domain_ids: Domain of every training sample; see :func:`robustdist.domains.find_domain_ids`. "targets", or the
            place of the label in a sample, makes domains of classes.
        domain_names: Names for logs; default the numbers.
        ratios: Mix of the beginning; default the shares in the training data.
        reference: Loss per domain that it should reach; default zero.
        rho: Radius of the ball, above 0.
        min_ratio: Smallest ratio to the potential mix before normalisation, in [0, 1).
        dynamic_reference: Predict the reference, from a tenth of training and eleven validations on (``dro`` only).
            Without ``reference`` the ratios stay as they are for that tenth.
        dynamic_ratio: Move the potential mix, from a fifth of training on (``dro`` only).
        step_size: Step size of ``sheared``.
        every_n_validations: Update after every n-th validation.
        seed: Seed of the draws.

    Raises:
        UsageError: If an argument is out of range; in ``fit`` if domains, loaders and options do not fit together.

    References:
        Deng et al., "DRPruning: Efficient Large Language Model Pruning through Distributionally Robust Optimization".
        Xia et al., "Sheared LLaMA: Accelerating Language Model Pre-training via Structured Pruning".
    """

    def __init__(
        self,
        method: Method = "dro",
        monitor: str = "val_loss",
        *,
        mode: Literal["min", "max"] = "min",
        domain_ids: DomainIds = None,
        domain_names: Sequence[str] | None = None,
        ratios: Sequence[float] | None = None,
        reference: Sequence[float] | None = None,
        rho: float = 0.1,
        min_ratio: float = 0.2,
        dynamic_reference: bool = True,
        dynamic_ratio: bool = True,
        step_size: float = 1.0,
        every_n_validations: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.method = method
        self.metrics = DomainMetrics(monitor, mode)
        self.domain_ids = domain_ids
        self.domain_names = None if domain_names is None else [str(name) for name in domain_names]
        self.initial = ratios
        self.every_n_validations = check_count(every_n_validations, "every_n_validations")
        self.seed = seed
        self._options = {
            "rho": rho,
            "min_ratio": min_ratio,
            "reference": reference,
            "dynamic_reference": dynamic_reference,
            "dynamic_ratio": dynamic_ratio,
            "step_size": step_size,
        }
        lengths = {name: len(value) for name, value in self._per_domain().items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{length} {name}" for name, length in lengths.items())
            raise UsageError(f"there are {listed}: give one per domain of each")
        some = next(iter(lengths.values()), 1 if reference is None else len(reference))
        self._mixer = self._make_mixer(ratios if ratios is not None else [1.0] * some)  # refuses what is out of range
        #: Draws the training samples; None before fit.
        self.sampler: DomainSampler | None = None
        self._progress = Progress()
        self._num_validations = 0
        self._restored: dict[str, Any] | None = None
        self._replaced = False

    # --- results

    @property
    def names(self) -> list[str]:
        """Names of the domains."""
        return self.domain_names or [str(domain) for domain in range(len(self._mixer.initial))]

    @property
    def ratios(self) -> dict[str, float]:
        """Share of every domain in the samples to come."""
        return dict(zip(self.names, self._mixer.ratios.tolist(), strict=True))

    @property
    def potential(self) -> dict[str, float]:
        """The mix that the ball is around."""
        return dict(zip(self.names, self._mixer.potential.tolist(), strict=True))

    @property
    def reference(self) -> dict[str, float]:
        """Loss that every domain should reach."""
        return dict(zip(self.names, self._mixer.reference.tolist(), strict=True))

    # --- hooks of the Trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the place of the strategy's ``process_dataloader``, through which every loader goes last."""
        if stage != "fit":
            return
        self.sampler, self._restored = None, None
        self._num_validations = 0
        self._progress.reset()
        original = trainer.strategy.process_dataloader

        def process_dataloader(dataloader: object) -> object:
            return original(self._swap(trainer, dataloader) if trainer.training else dataloader)

        trainer.strategy.process_dataloader = process_dataloader  # type: ignore[method-assign]
        self._replaced = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See whether loaders and domains fit together."""
        if self.sampler is None or not isinstance(trainer.train_dataloader, DomainLoader):
            raise UsageError(
                "DomainReweighting draws for one training DataLoader, and the data give several or none: join their "
                "data sets with torch.utils.data.ConcatDataset, whose parts are domains then"
            )
        if self.method != "constant":
            self._check_validation(trainer)
        moving = self._mixer.dynamic_reference or self._mixer.dynamic_ratio
        self._progress.start(
            trainer, pl_module, "method='dro' with dynamic_reference or dynamic_ratio" if moving else None
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch of the sampler, also after one that was cut short."""
        if self.sampler is not None:
            self.sampler.end_epoch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples of the batch as consumed: those that wait in worker processes are not."""
        assert self.sampler is not None
        loader: Any = trainer.train_dataloader
        self.sampler.consume(loader.batch_size)
        if trainer.is_last_batch:
            self.sampler.end_epoch()
        self._progress.end_batch(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch of the sampler, before a checkpoint is saved."""
        if self.sampler is not None:
            self.sampler.end_epoch()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set new ratios. At this point every metric of the validation is there, and no checkpoint was saved yet."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or self.method == "constant" or self.sampler is None:
            return
        self._num_validations += 1
        if self._num_validations % self.every_n_validations:
            return
        with failing_together():
            own = self.metrics.losses(trainer.callback_metrics, self.names)
        shared = gathered((own, self.sampler.num_drawn))
        losses = [sum(of_one) / len(shared) for of_one in zip(*(one for one, _ in shared), strict=True)]
        taken = True
        if trainer.is_global_zero:
            taken = self._mixer.update(losses, self.sampler.counts, self._progress.value)
        taken, state = trainer.strategy.broadcast((taken, self._mixer.state_dict()))
        if not taken:
            strange = [f"{name} {loss}" for name, loss in zip(self.names, losses, strict=True) if not isfinite(loss)]
            rank_zero_warn(
                f"DomainReweighting keeps its ratios: the metrics by monitor={self.metrics.monitor!r} are not finite "
                f"({', '.join(strange)})",
                category=RobustDistWarning,
            )
            return
        self._mixer.load_state_dict(state)
        # processes may have drawn different numbers ahead
        self.sampler.set_ratios(self._mixer.ratios, start=max(drawn for _, drawn in shared))
        self._log(trainer, losses)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop to count."""
        self._progress.stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the strategy its method back."""
        self._release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the strategy its method back."""
        self._release(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return ratios, references, the losses they rest on and what was consumed of the data."""
        if self.sampler is None:
            return {}
        return {
            "mixer": self._mixer.state_dict(),
            "sampler": self.sampler.state_dict(),
            "progress": self._progress.state_dict(),
            "num_validations": self._num_validations,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue as soon as the training loader is there."""
        self._restored = state_dict
        self._num_validations = state_dict["num_validations"]
        self._progress.load_state_dict(state_dict["progress"])
        self._resume()

    # --- parts

    def _per_domain(self) -> dict[str, Sequence[Any]]:
        options = {
            "domain_names": self.domain_names,
            "ratios": self.initial,
            "reference": self._options["reference"],
        }
        return {name: value for name, value in options.items() if isinstance(value, Sequence)}

    def _make_mixer(self, initial: Sequence[float]) -> DomainMixer:
        return DomainMixer(initial, self.method, seed=self.seed, **self._options)  # type: ignore[arg-type]

    def _swap(self, trainer: Trainer, loader: object) -> object:
        """Return a loader that draws by domain in the place of the training loader."""
        if not isinstance(loader, DataLoader):
            raise UsageError(
                f"DomainReweighting needs a torch DataLoader for training, not {type(loader).__name__}: only its "
                "samples can be drawn by domain"
            )
        ids = self.domain_ids
        if ids is None and isinstance(loader.sampler, DomainSampler):
            ids = loader.sampler.domain_ids
        found = find_domain_ids(loader.dataset, ids)
        if self.sampler is None:
            self._begin(trainer, found)
        assert self.sampler is not None
        if found != self.sampler.domain_ids:
            raise UsageError(
                "DomainReweighting found other domains when the training loader was made again: leave "
                "reload_dataloaders_every_n_epochs out, or give one training loader"
            )
        return with_sampler(loader, self.sampler)

    def _begin(self, trainer: Trainer, ids: list[int]) -> None:
        lengths = {len(value) for value in self._per_domain().values()}
        num_domains = max(lengths, default=1 + max(ids, default=0))
        # processes of one replica read the same samples
        place = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        sampler = DomainSampler(
            ids, [1.0] * num_domains, seed=self.seed, rank=place["rank"], world_size=place["num_replicas"]
        )
        self._mixer = self._make_mixer(sampler.sizes if self.initial is None else self.initial)
        sampler.set_ratios(self._mixer.ratios)
        self.sampler = sampler
        self._resume()

    def _resume(self) -> None:
        if self.sampler is not None and self._restored is not None:
            self._mixer.load_state_dict(self._restored["mixer"])
            self.sampler.load_state_dict(self._restored["sampler"])
            self._restored = None

    def _check_validation(self, trainer: Trainer) -> None:
        if not trainer.enable_validation:
            raise UsageError(
                f"method={self.method!r} needs validation in fit: give a validation_step, one validation loader per "
                "domain and limit_val_batches > 0, or take method='constant'"
            )
        self.metrics.check_loaders(len(trainer.num_val_batches), self.names)

    def _log(self, trainer: Trainer, losses: list[float]) -> None:
        figures = {}
        for name, loss in zip(self.names, losses, strict=True):
            figures[f"domains/ratio/{name}"] = self.ratios[name]
            figures[f"domains/loss/{name}"] = loss
            figures[f"domains/reference/{name}"] = self.reference[name]
        # log() is closed by now; earlier, the module would not have logged all of its own yet
        trainer.callback_metrics.update({key: torch.tensor(value) for key, value in figures.items()})
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

    def _release(self, trainer: Trainer) -> None:
        self._progress.stop()
        if self._replaced:
            del trainer.strategy.process_dataloader  # the method of its class shows again
            self._replaced = False
