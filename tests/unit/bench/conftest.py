"""Sentences and a small model, as the packages of benchmarks bring them."""

import pytest

from tests.bert import tiny_bert
from tests.vader import write_source, write_tokenizer


@pytest.fixture(scope="package")
def source(tmp_path_factory) -> str:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="package")
def folder(tmp_path_factory, require) -> str:
    """A model and its tokenizer as Hugging Face saves them."""
    require("transformers")
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    tiny_bert(vocab_size=100, num_labels=2, dropout=0.1).save_pretrained(path)
    return str(path)
