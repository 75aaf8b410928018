"""An archive with the layout of vaderSentiment's source distribution, and a tokenizer for it, made on the spot."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

WORDS = ["the", "film", "was", "a", "tweet", "bought", "paper", "fine", "awful", "good", "bad", "great", "poor", "ok"]
FILES = ("tweets", "movieReviewSnippets", "amazonReviewSnippets", "nytEditorialSnippets")


def rows(place: int, count: int = 60) -> list[tuple[float, str]]:
    """Valence and text: every third row is unclear; the texts are all different and say their class."""
    found = []
    for number in range(count):
        valence = (2.5, -1.0, 0.4)[number % 3]
        word = ("good", "bad", "ok")[number % 3]
        filler = [WORDS[(number // 3**power + place) % len(WORDS)] for power in range(1 + number % 4)]
        found.append((valence, f"{word} {FILES[place]} {number} {' '.join(filler)}"))
    return found


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def write_source(folder: Path, lines: dict[str, str] | None = None, inner_name: str = "hutto_ICWSM_2014") -> str:
    """Write the archive and return its path; ``lines`` replaces the content of files by their first name."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        for place, name in enumerate(FILES):
            text = "".join(f"{number}\t{v}\t{t}\r\n" for number, (v, t) in enumerate(rows(place), 1))
            add(archive, f"{inner_name}/{name}_GroundTruth.txt", (lines or {}).get(name, text).encode())
    path = folder / "vaderSentiment-3.3.2.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        add(archive, "vaderSentiment-3.3.2/setup.py", b"")
        add(archive, "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
    return str(path)


def write_tokenizer(folder: Path) -> str:
    """Write a Hugging Face tokenizer of whole words, saved as people save theirs, and return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    numbers = [str(number) for number in range(60)]
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS, *numbers])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return str(folder)
