"""The four domains, read from an archive of the real layout that is made here."""

from __future__ import annotations

import re

import pytest
import torch
from jsonargparse import ArgumentParser

from robustdist.data import VADERDataModule
from robustdist.data.vader import read_ratings
from robustdist.errors import UsageError
from tests.vader import rows, write_source, write_tokenizer

SIZES = {"num_train": 16, "num_val": 8, "num_test": 8}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, require) -> str:
    require("transformers")
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make(source, tokenizer):
    return lambda **options: VADERDataModule(tokenizer, **{"source": source, "batch_size": 5, **SIZES, **options})


def texts(data: VADERDataModule, sentences) -> list[str]:
    return [data.tokenizer.decode(sentence["input_ids"]) for sentence in sentences]


def test_ratings_are_those_of_the_files(source):
    found = read_ratings(source, ["amazon", "nyt"])
    assert found == {"amazon": rows(2), "nyt": rows(3)}


def test_parts_are_balanced_disjoint_and_clear(make):
    data = make()
    for part, size in zip(data.parts, (16, 8, 8), strict=True):
        assert [len(domain) for domain in part] == [size] * 4
        for domain in part:
            assert sum(sentence["labels"] for sentence in domain) == size // 2
    numbers = [re.findall(r"\d+", text)[0] for part in data.parts for text in texts(data, part[0])]
    assert len(set(numbers)) == len(numbers) == 32
    for part in data.parts:
        for domain in part:
            for sentence, text in zip(domain, texts(data, domain), strict=True):
                assert text.startswith("[CLS] good" if sentence["labels"] else "[CLS] bad")
                assert text.endswith("[SEP]")


def test_beginnings_are_balanced_too(make):
    labels = [sentence["labels"] for sentence in make().parts.test[1]]
    assert labels == [0, 1] * 4


def test_the_threshold_of_valence(make):
    assert make(min_valence=1.0).parts
    with pytest.raises(UsageError, match=r"the domain tweets has 0 negative and 20 positive ones with min_valence=1.5"):
        make(min_valence=1.5).setup()
    everything = make(min_valence=0.3, num_train=20, num_val=10, num_test=10)
    found = [text for part in everything.parts for text in texts(everything, part[0])]
    assert any("ok" in text.split() for text in found)


def test_the_seed_decides_and_the_test_part_does_not_depend_on_the_others(make):
    first, again, other = make(), make(), make(seed=1)
    smaller = make(num_train=4, num_val=2)

    def test_ids(data):
        return [sentence["input_ids"] for domain in data.parts.test for sentence in domain]

    assert test_ids(first) == test_ids(again) == test_ids(smaller)
    assert test_ids(first) != test_ids(other)
    state = torch.get_rng_state()
    make().setup()
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_are_padded_to_their_longest(make):
    data = make()
    loader = data.train_dataloader()
    sizes = [len(batch["labels"]) for batch in loader]
    assert sum(sizes) == 64
    widths = set()
    for batch in loader:
        assert list(batch) == ["input_ids", "attention_mask", "labels"]
        assert batch["input_ids"].shape == batch["attention_mask"].shape
        assert int(batch["attention_mask"].sum(1).max()) == batch["input_ids"].shape[1]
        assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == 0)
        assert batch["labels"].dtype == torch.int64
        widths.add(batch["input_ids"].shape[1])
    assert len(widths) > 1
    assert all(batch["input_ids"].shape[1] <= 4 for batch in make(max_length=4).train_dataloader())


def test_evaluation_has_one_loader_per_domain_in_order(make):
    data = make(domains=["nyt", "tweets"], with_domain=True)
    for loaders, count in ((data.val_dataloader(), 8), (data.test_dataloader(), 8)):
        for place, loader in enumerate(loaders):
            batches = list(loader)
            assert sum(len(batch["labels"]) for batch in batches) == count
            assert all(bool((batch["domain"] == place).all()) for batch in batches)
            assert torch.equal(next(iter(loader))["input_ids"], batches[0]["input_ids"])
    domains = torch.cat([batch["domain"] for batch in data.train_dataloader()])
    assert domains.sum() == 16
    assert "[CLS] bad tweets" not in texts(data, data.parts.test[0])


def test_training_is_shuffled(make):
    loader = make().train_dataloader()
    first, second = (torch.cat([batch["labels"] for batch in loader]).tolist() for _ in range(2))
    assert first != second


def test_it_is_configured_by_yaml(source, tokenizer):
    parser = ArgumentParser()
    parser.add_subclass_arguments(VADERDataModule, "data")
    options = {"tokenizer": tokenizer, "source": source, "domains": ["movie"], "num_train": 4}
    config = parser.parse_object(
        {
            "data": {
                "class_path": "robustdist.data.VADERDataModule",
                "init_args": {**options, "num_val": 2, "num_test": 2},
            }
        }
    )
    data = parser.instantiate(config).data
    assert len(next(iter(data.test_dataloader()[0]))["labels"]) == 2


def test_a_tokenizer_of_the_users_own(source, tokenizer):
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(tokenizer)
    data = VADERDataModule(own, source=source, **SIZES)
    assert data.parts.train[0][0]["input_ids"][0] == 1
    assert data.tokenizer is own


def test_the_environment_names_the_source(make, source, monkeypatch):
    monkeypatch.setenv("ROBUSTDIST_VADER", source)
    assert make(source=None).parts
    monkeypatch.setenv("ROBUSTDIST_VADER", source + ".missing")
    with pytest.raises(UsageError, match=r"ROBUSTDIST_VADER='.*missing' is not a file"):
        make(source=None).setup()
    assert make().parts  # the argument comes first


def test_without_a_source_the_message_says_how_to_get_it(make, monkeypatch):
    monkeypatch.delenv("ROBUSTDIST_VADER", raising=False)
    with pytest.raises(
        UsageError, match=r"pip download --no-deps --no-binary=:all: vaderSentiment==3.3.2.*wheel lacks"
    ):
        make(source=None).setup()
    with pytest.raises(UsageError, match=r"source='nowhere' is not a file.*pip download"):
        make(source="nowhere").setup()


@pytest.mark.parametrize(
    "lines",
    [{"tweets": "1\t2.0"}, {"tweets": "1\tlots\ttext"}, {"tweets": "1\t2.0\ttext\tmore"}],
    ids=["short", "no number", "long"],
)
def test_damaged_files_are_named(make, tmp_path, lines):
    with pytest.raises(UsageError, match="is not a readable source distribution of vaderSentiment"):
        make(source=write_source(tmp_path, lines)).setup()


def test_other_archives_are_refused(make, tmp_path):
    wheel = tmp_path / "vaderSentiment.whl"
    wheel.write_bytes(b"PK\x03\x04 not a tar")
    with pytest.raises(UsageError, match="the wheel lacks the sentences"):
        make(source=str(wheel)).setup()
    with pytest.raises(UsageError, match="is not a readable source distribution"):
        make(source=write_source(tmp_path, inner_name="other")).setup()


def test_a_tokenizer_that_is_not_there_is_named(source, require, monkeypatch):
    require("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="tokenizer='/nowhere/at/all' cannot be loaded"):
        VADERDataModule("/nowhere/at/all", source=source).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"max_length": 2}, "max_length=2 must be at least 3"),
        ({"num_test": 3}, "num_test=3 must be an even number"),
        ({"num_train": 0}, "num_train=0 must be an even number"),
        ({"domains": []}, r"domains=\[\] must be different ones of tweets, movie, amazon, nyt"),
        ({"domains": ["films"]}, r"domains=\['films'\]"),
        ({"domains": ["nyt", "nyt"]}, r"domains=\['nyt', 'nyt'\]"),
        ({"min_valence": 0}, "min_valence=0 must be above 0"),
        ({"min_valence": 5}, "min_valence=5"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        VADERDataModule("any", **options)


def test_too_few_sentences(make):
    with pytest.raises(
        UsageError, match="ask for 24 sentences per class, but the domain tweets has 20 negative and 20"
    ):
        make(num_train=32).setup()
