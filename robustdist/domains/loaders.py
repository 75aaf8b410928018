"""Find the domains of a data set, and put a sampler into a loader that somebody else made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from robustdist.domains.sampler import DomainSampler
from robustdist.errors import UsageError

__all__ = ["DomainIds", "DomainLoader", "find_domain_ids", "with_sampler"]

#: Where the domain of a sample is found: see :func:`find_domain_ids`.
DomainIds: TypeAlias = str | int | Sequence[int] | Callable[[Any], Sequence[int]] | None

_OWN = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler"}


class DomainLoader(DataLoader[Any]):
    """A ``DataLoader`` over a :class:`DomainSampler`, which a training can resume in mid-epoch."""

    sampler: DomainSampler

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        self.sampler.load_state_dict(state)


def with_sampler(loader: DataLoader[Any], sampler: DomainSampler) -> DomainLoader:
    """Return a loader like ``loader`` that draws from ``sampler``.

    Raises:
        UsageError: If the loader makes its batches in a way of its own.
    """
    if loader.batch_size is None or type(loader).__iter__ not in (DataLoader.__iter__, DomainLoader.__iter__):
        raise UsageError(
            "domain_ids needs a plain DataLoader for training, with batch_size and without a batch_sampler: in another "
            f"loader ({type(loader).__name__}) the samples cannot be drawn by domain"
        )
    names = inspect.signature(DataLoader.__init__).parameters.keys() - _OWN
    options = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if not options.get("pin_memory_device"):
        options.pop("pin_memory_device", None)  # giving it, even empty, is deprecated
    return DomainLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler, **options)


def find_domain_ids(dataset: Any, domain_ids: DomainIds = None) -> list[int]:
    """Return the domain of every sample of ``dataset``.

    Args:
        dataset: A data set with a length; parts (``Subset``) of one are looked through.
        domain_ids: The name of an attribute of the data set, such as "targets"; or the key (text or number) under
            which a sample holds its domain, for which every sample is read once; or a function of the data set that
            returns the domains; or the domains. None takes an attribute ``domain_ids``, or the parts of a
            ``ConcatDataset``.

    Raises:
        UsageError: If the domains are not found, are not whole numbers, or are not as many as the samples.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError("domain_ids needs a training data set with a length: an iterable one cannot be drawn from")
    found = _look_up(dataset, domain_ids)
    listed = found.tolist() if isinstance(found, Tensor) else list(found)
    if len(listed) != len(dataset):
        raise UsageError(f"domain_ids gives {len(listed)} domains for {len(dataset)} training samples: give one each")
    try:
        numbers = [int(value) for value in listed]
    except (TypeError, ValueError) as error:
        raise UsageError(f"domain_ids must be whole numbers from 0, one per training sample ({error})") from error
    if any(number != value for number, value in zip(numbers, listed, strict=True)):
        raise UsageError("domain_ids must be whole numbers from 0, one per training sample")
    return numbers


def _look_up(dataset: Any, domain_ids: DomainIds) -> Any:
    if callable(domain_ids):
        return domain_ids(dataset)
    if domain_ids is None:
        if hasattr(dataset, "domain_ids"):
            return dataset.domain_ids
        if isinstance(dataset, ConcatDataset):
            return [part for part, one in enumerate(dataset.datasets) for _ in range(_length(one))]
        if not isinstance(dataset, Subset):
            raise UsageError(
                f"domain_ids is not set and {type(dataset).__name__} does not tell the domains of its samples: give an "
                "attribute of the data set, a key of its samples, a function or a list"
            )
    elif not isinstance(domain_ids, (str, int)):
        return domain_ids
    if isinstance(domain_ids, str) and hasattr(dataset, domain_ids):
        return getattr(dataset, domain_ids)
    if isinstance(dataset, Subset):
        whole = _look_up(dataset.dataset, domain_ids)
        return [whole[place] for place in dataset.indices]
    if isinstance(dataset, TensorDataset) and isinstance(domain_ids, int) and domain_ids < len(dataset.tensors):
        return dataset.tensors[domain_ids]
    return _read(dataset, domain_ids)


def _read(dataset: Any, key: Any) -> list[Any]:
    sample = dataset[0] if _length(dataset) else None
    has_key = key in sample if isinstance(sample, Mapping) else isinstance(key, int) and isinstance(sample, Sequence)
    if not has_key or (isinstance(sample, Sequence) and key >= len(sample)):
        held = f"keys {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
        raise UsageError(
            f"domain_ids={key!r} is neither an attribute of {type(dataset).__name__} nor a key of its samples "
            f"({held}): give one of these, a function of the data set or a list"
        )
    return [dataset[place][key] for place in range(_length(dataset))]


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]
