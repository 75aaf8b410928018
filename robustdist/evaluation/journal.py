"""Finished images of an evaluation on disk, so that one that was killed half-way goes on where it was.

A folder holds ``journal.json``, which says what is evaluated, and per process a file of lines, one line per batch. A
line is written and synced after its batch; a torn last line does not parse and is ignored. Adversarial images that
are to be saved go into files of their own before the line that names them.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from robustdist.core.files import write_whole
from robustdist.errors import RobustDistWarning
from robustdist.evaluation.findings import Findings
from robustdist.evaluation.identity import image_digests
from robustdist.evaluation.saved import save_part, saved_bytes

__all__ = ["Journal"]

_HEADER = "journal.json"
_PANEL = "panel.pt"
_FORMAT = 1

Panel = list[tuple[Tensor, Tensor, int, int, int]]


class Journal:
    """Writes rows of :class:`Records` down and finds them again.

    An image is taken from the journal if its place in the data, its pixels and its label are those of the row, and
    weights, attacks and data of the whole evaluation are the same; the number of processes may be another.

    Args:
        folder: Where it is kept, on a file system that all processes share.
        key: What decides the verdicts, by name: hashes of weights, attacks, data, ... Another key starts afresh.
        rank: This process.
        gather: Returns the value of every process; all of them enter.
        resume: Whether to use what is there.
        save_images: Whether to keep the adversarial images.

    Attributes:
        message: What to tell the user about what was found, or None.
        findings: What earlier runs found out about the evaluation.
        earlier_seconds: Seconds per attack that earlier runs took.
    """

    def __init__(
        self,
        folder: Path,
        key: Mapping[str, str],
        rank: int,
        gather: Callable[[Any], list[Any]],
        *,
        resume: bool = True,
        save_images: bool = False,
    ) -> None:
        self.folder = folder
        self.key = dict(key)
        self.rank = rank
        self.gather = gather
        self.resume = resume
        self.save_images = save_images
        self.message: str | None = None
        self.findings = Findings()
        self.earlier_seconds: dict[str, float] = {}
        self.num_known = 0
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._image_files: list[str] = []
        self._run = 0
        self._num_files = 0
        self._panel_size = 0
        self._file: IO[str] | None = None
        self._prediction = 0
        self._warned = False

    def open(self, columns: Sequence[str]) -> None:
        """Read what earlier runs left and begin to write; a collective."""
        self._prediction = list(columns).index("prediction")
        header = {"format": _FORMAT, "columns": list(columns), "images": self.save_images, **self.key}
        found = self._read_header()
        usable = self.resume and found == header
        if usable:
            self._read_lines()
        self.gather(None)  # nobody writes or removes before all have read
        if self.rank == 0:
            if not usable:
                self._say_why_afresh(found, header)
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            for orphan in {path.name for path in self.folder.glob("images-*.pt")} - set(self._image_files):
                (self.folder / orphan).unlink()
            write_whole(self.folder / _HEADER, json.dumps(header, indent=1).encode())
        self.gather(None)
        self._file = (self.folder / f"rank{self.rank}.jsonl").open("a+", encoding="utf-8")
        self._file.write("\n")  # what a torn line left must not swallow the next one

    def _read_header(self) -> Any:
        path = self.folder / _HEADER
        try:
            header = json.loads(path.read_text("utf-8")) if path.exists() else None
        except ValueError:
            return {}
        return header if header is None or isinstance(header, dict) else {}

    def _say_why_afresh(self, found: Any, header: Mapping[str, Any]) -> None:
        if self.resume and found is not None:
            changed = [name for name in header if found.get(name) != header[name]]
            self.message = (
                f"{self.folder} holds a half-finished evaluation with other {' and '.join(changed)}: starting afresh"
            )

    def _read_lines(self) -> None:
        seconds: dict[int, dict[str, float]] = {}
        for path in sorted(self.folder.glob("rank*.jsonl")):
            last: dict[int, dict[str, float]] = {}
            for text in path.read_text("utf-8", errors="replace").splitlines():
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # torn by the end of its process, so its batch is done again
                for row in line["rows"]:
                    self._known[tuple(row[:3])] = row
                self.findings.merge([Findings(**line["findings"])])
                last[line["run"]] = line["seconds"]
                if line["images"] is not None:
                    self._image_files.append(line["images"])
            for run, cumulated in last.items():
                slowest = seconds.setdefault(run, {})
                for name, value in cumulated.items():
                    slowest[name] = max(slowest.get(name, 0.0), value)
        self._run = 1 + max(seconds, default=-1)
        for cumulated in seconds.values():
            for name, value in cumulated.items():
                self.earlier_seconds[name] = self.earlier_seconds.get(name, 0.0) + value
        self.num_known = len(self._known)
        if self._known:
            self.message = f"{self.folder} holds {self.num_known} finished images of this evaluation: going on"

    def examples(self) -> Panel:
        """Return the samples for the eye that earlier runs kept; they belong to the first process."""
        path = self.folder / _PANEL
        if self.rank or not self._known or not path.exists():
            return []
        return [tuple(entry) for entry in torch.load(path, weights_only=True)]

    def look_up(self, rows: Tensor, x: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        """Return ``rows`` with digests and with known images filled in, and which of them are known.

        An image is known only if the model still predicts the same for it without attack.

        Args:
            rows: Rows of a batch with loader, id, label and prediction set.
            x: Its inputs.
            y: Its labels.
        """
        filled = rows.clone()
        filled[:, 2] = image_digests(x, y)
        known = torch.zeros(len(rows), dtype=torch.bool)
        for place, key in enumerate(filled[:, :3].tolist()):
            row = self._known.get(tuple(key))
            if row is None or key[1] < 0:
                continue
            if row[self._prediction] != int(filled[place, self._prediction]):
                self._warn_of_another_model()
                continue
            filled[place], known[place] = torch.tensor(row), True
        return filled, known

    def _warn_of_another_model(self) -> None:
        """Say that the model answers otherwise, though its weights are the same; those images are attacked again."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.folder} holds images that the model with the same weights predicts otherwise now: if code or "
                "settings outside the weights have changed, start afresh with resume=False",
                RobustDistWarning,
                stacklevel=2,
            )

    def write(
        self, rows: Tensor, findings: Findings, seconds: Mapping[str, float], panel: Panel, pixels: Tensor
    ) -> None:
        """Write one batch down.

        Args:
            rows: Its new rows.
            findings: Everything found out so far.
            seconds: Seconds per attack so far, of this process in this run.
            panel: The samples kept for the eye so far.
            pixels: Adversarial images of the rows, in pixel units.
        """
        assert self._file is not None
        images = None
        if self.save_images:
            images = f"images-{self._run}-{self.rank}-{self._num_files}.pt"
            self._num_files += 1
            save_part(self.folder / images, pixels, rows[:, 0], rows[:, 1], rows[:, 3])
            self._image_files.append(images)
        if self.rank == 0 and len(panel) > self._panel_size:
            self._panel_size = len(panel)
            write_whole(self.folder / _PANEL, saved_bytes([list(entry) for entry in panel]))
        line = {
            "run": self._run,
            "rows": rows.tolist(),
            "findings": asdict(findings),
            "seconds": dict(seconds),
            "images": images,
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def image_files(self) -> list[Path]:
        """Return the files of adversarial images that all processes wrote, those of later runs last; a collective."""
        names = {name for files in self.gather(self._image_files) for name in files}
        return [self.folder / name for name in sorted(names, key=_run_rank_number)]

    def close(self) -> None:
        """Stop writing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the folder: the evaluation is finished and reported."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _run_rank_number(name: str) -> list[int]:
    """Return the numbers in the name of a file of images: as text, run 10 would come before run 9."""
    return [int(part) for part in name.removesuffix(".pt").split("-")[1:]]
