"""Sentences of four domains with human sentiment ratings, from the source distribution of vaderSentiment."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from robustdist._lightning import LightningDataModule
from robustdist.errors import UsageError

__all__ = ["Domain", "Sentences", "VADERDataModule"]

_ENVIRONMENT = "ROBUSTDIST_VADER"
_ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
_MEMBER = "hutto_ICWSM_2014/{}_GroundTruth.txt"
_DOWNLOAD = "pip download --no-deps --no-binary=:all: vaderSentiment==3.3.2"

Domain = Literal["tweets", "movie", "amazon", "nyt"]
_FILES: dict[Domain, str] = {
    "tweets": "tweets",
    "movie": "movieReviewSnippets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
}


class Sentences(Dataset[dict[str, Any]]):
    """Tokenised sentences: ``input_ids``, ``attention_mask``, ``labels`` and, if asked for, ``domain``."""

    def __init__(self, encoded: Sequence[dict[str, Any]]) -> None:
        self._encoded = list(encoded)

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._encoded[index]


class _Parts(NamedTuple):
    """Per part, one data set per domain."""

    train: list[Sentences]
    val: list[Sentences]
    test: list[Sentences]


class VADERDataModule(LightningDataModule):
    """Positive or negative? Tweets, movie reviews, Amazon reviews and newspaper editorials, rated by people.

    The ground truth behind the VADER sentiment lexicon: 4 domains, mean human valence from -4 to 4. A sentence is
    positive or negative if its valence is at least ``min_valence`` in size; the others are left out. All parts are
    balanced over domains and classes, and disjoint.

    The files are in the source distribution of vaderSentiment, not in its wheel, and nothing is downloaded here:
    ``pip download --no-deps --no-binary=:all: vaderSentiment==3.3.2``. Needs transformers:
    ``pip install 'robustdist[text]'``.

    Batches are dictionaries of ``input_ids`` and ``attention_mask`` of shape (batch, tokens), padded to the longest
    sentence of the batch, and ``labels`` of shape (batch,). Training draws from all domains; validation and test have
    one loader per domain, in the order of ``domains``.

    Args:
        tokenizer: Name or folder of a Hugging Face tokenizer, or the tokenizer itself.
        source: Path of ``vaderSentiment-*.tar.gz``; default the environment variable ROBUSTDIST_VADER.
        batch_size: Sentences per batch and process.
        num_train, num_val, num_test: Sentences per domain and part; even numbers.
        domains: Which domains, a choice of tweets, movie, amazon and nyt.
        max_length: Tokens after which a sentence is cut.
        min_valence: Smallest size of the valence.
        with_domain: Add the place of the domain in ``domains`` to the batch, under "domain".
        num_workers: Worker processes per loader.
        seed: Seed of the split.

    Raises:
        UsageError: If an argument is out of range.
    """

    num_classes = 2

    def __init__(
        self,
        tokenizer: str | Any,
        source: str | None = None,
        batch_size: int = 32,
        num_train: int = 400,
        num_val: int = 100,
        num_test: int = 200,
        domains: Sequence[Domain] = ("tweets", "movie", "amazon", "nyt"),
        max_length: int = 32,
        min_valence: float = 1.0,
        with_domain: bool = False,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for option, value, smallest in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("max_length", max_length, 3),
        ):
            if value < smallest:
                raise UsageError(f"{option}={value} must be at least {smallest}")
        for option, value in (("num_train", num_train), ("num_val", num_val), ("num_test", num_test)):
            if value < 2 or value % 2:
                raise UsageError(f"{option}={value} must be an even number of at least 2: both classes get one half")
        unknown = [domain for domain in domains if domain not in _FILES]
        if unknown or not domains or len(set(domains)) < len(domains):
            raise UsageError(f"domains={list(domains)!r} must be different ones of {', '.join(_FILES)}")
        if not 0 < min_valence <= 4:
            raise UsageError(f"min_valence={min_valence} must be above 0 and at most 4")
        self.tokenizer: Any = tokenizer
        self.source = source
        self.batch_size = batch_size
        self.sizes = (num_train, num_val, num_test)
        self.domains = tuple(domains)
        self.max_length = max_length
        self.min_valence = min_valence
        self.with_domain = with_domain
        self.num_workers = num_workers
        self.seed = seed
        self._parts: _Parts | None = None

    @property
    def parts(self) -> _Parts:
        """The three parts, read and tokenised now if they have not been."""
        if self._parts is None:
            self._parts = self._load()
        return self._parts

    def setup(self, stage: str | None = None) -> None:
        """Read the data; the same parts serve every stage."""
        _ = self.parts

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Return a loader over the training sentences of all domains, shuffled anew in every epoch."""
        everything = [sentence for domain in self.parts.train for sentence in domain]  # type: ignore[attr-defined]
        return self._loader(Sentences(everything), shuffle=True)

    def val_dataloader(self) -> list[DataLoader[dict[str, Any]]]:
        """Return one loader per domain over the validation part, always in the same order."""
        return [self._loader(domain) for domain in self.parts.val]

    def test_dataloader(self) -> list[DataLoader[dict[str, Any]]]:
        """Return one loader per domain over the test part, always in the same order."""
        return [self._loader(domain) for domain in self.parts.test]

    def _loader(self, sentences: Sentences, *, shuffle: bool = False) -> DataLoader[dict[str, Any]]:
        return DataLoader(
            sentences,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=self._collate,
        )

    def _collate(self, sentences: list[dict[str, Any]]) -> dict[str, Tensor]:
        lists = [{key: sentence[key] for key in ("input_ids", "attention_mask")} for sentence in sentences]
        padded = self.tokenizer.pad(lists, return_tensors="pt")
        batch = {key: padded[key] for key in ("input_ids", "attention_mask")}
        for key in ("labels", "domain") if self.with_domain else ("labels",):
            batch[key] = torch.tensor([sentence[key] for sentence in sentences])
        return batch

    def _load(self) -> _Parts:
        ratings = read_ratings(find_source(self.source), self.domains)
        self.tokenizer = _tokenizer(self.tokenizer)
        parts = _Parts([], [], [])
        for place, domain in enumerate(self.domains):
            for part, rows in zip(parts, self._split(ratings[domain], domain), strict=True):
                part.append(self._encode(rows, place))
        return parts

    def _split(self, rated: list[tuple[float, str]], domain: str) -> list[list[tuple[int, str]]]:
        """Return the rows (label, text) of the three parts of one domain, the classes in turn."""
        generator = torch.Generator().manual_seed(self.seed)
        classes: list[list[tuple[int, str]]] = [[], []]
        # a sentence that occurs twice shall not be in two parts
        for text, valence in sorted({text: valence for valence, text in rated}.items()):
            if abs(valence) >= self.min_valence:
                classes[valence > 0].append((int(valence > 0), text))
        if min(map(len, classes)) < sum(self.sizes) // 2:
            raise UsageError(
                f"num_train, num_val and num_test ask for {sum(self.sizes) // 2} sentences per class, but the domain "
                f"{domain} has {len(classes[0])} negative and {len(classes[1])} positive ones with "
                f"min_valence={self.min_valence:g}: reduce them"
            )
        orders = [torch.randperm(len(rows), generator=generator).tolist() for rows in classes]
        shuffled = [row for pair in zip(*orders, strict=False) for row in zip(classes, pair, strict=True)]
        chosen = iter([rows[place] for rows, place in shuffled])
        # the test part first: it does not depend on how much is trained on
        test, val, train = ([next(chosen) for _ in range(size)] for size in reversed(self.sizes))
        return [train, val, test]

    def _encode(self, rows: list[tuple[int, str]], domain: int) -> Sentences:
        encoded = self.tokenizer([text for _, text in rows], truncation=True, max_length=self.max_length)
        ids, masks = encoded["input_ids"], encoded["attention_mask"]
        return Sentences(
            [
                {"input_ids": ids[row], "attention_mask": masks[row], "labels": label, "domain": domain}
                for row, (label, _) in enumerate(rows)
            ]
        )


def find_source(source: str | None) -> Path:
    """Return the path of the source distribution.

    Raises:
        UsageError: If it is not given or not there.
    """
    chosen = source or os.environ.get(_ENVIRONMENT)
    if not chosen:
        raise UsageError(
            f"source is not set: get the source distribution with `{_DOWNLOAD}` (the wheel lacks the sentences) and "
            f"give its path as source or in the environment variable {_ENVIRONMENT}"
        )
    path = Path(chosen).expanduser()
    if not path.is_file():
        raise UsageError(
            f"{'source' if source else _ENVIRONMENT}={chosen!r} is not a file: give the path of "
            f"vaderSentiment-3.3.2.tar.gz, from `{_DOWNLOAD}`"
        )
    return path


def read_ratings(path: Path, domains: Sequence[Domain]) -> dict[Domain, list[tuple[float, str]]]:
    """Return the rows (mean valence, text) of every domain, read from the archive inside the source distribution.

    Raises:
        UsageError: If the file is not the source distribution, or damaged.
    """
    ratings: dict[Domain, list[tuple[float, str]]] = {}
    try:
        with tarfile.open(path) as outer:
            (name,) = [name for name in outer.getnames() if name.endswith(f"/{_ARCHIVE}")]
            with tarfile.open(fileobj=io.BytesIO(_read(outer, name))) as inner:
                for domain in domains:
                    lines = _read(inner, _MEMBER.format(_FILES[domain])).decode("utf-8").splitlines()
                    # number, mean valence, text
                    fields = [line.split("\t") for line in lines if line]
                    ratings[domain] = [(float(valence), text.strip()) for _, valence, text in fields]
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError) as error:
        raise UsageError(
            f"source={str(path)!r} is not a readable source distribution of vaderSentiment ({error}): the wheel lacks "
            f"the sentences, get it with `{_DOWNLOAD}`"
        ) from error
    return ratings


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    if member is None:
        raise KeyError(f"{name} is no file")
    return member.read()


def _tokenizer(tokenizer: str | Any) -> Any:
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError("VADERDataModule needs transformers: pip install 'robustdist[text]'") from error
    try:
        return AutoTokenizer.from_pretrained(str(tokenizer))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"tokenizer={str(tokenizer)!r} cannot be loaded ({reason}): give a folder or a name"
        ) from error
