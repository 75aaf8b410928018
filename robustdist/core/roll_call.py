"""Who still answers after a collective has failed."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable, Iterable
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from robustdist.errors import UsageError

__all__ = ["PATIENCE", "RollCall"]

#: Seconds that ranks have to answer.
PATIENCE = 4.0
#: Seconds between two looks into the store.
_PERIOD = 0.5
#: Seconds that a rank stays for the others to read, because the store may end with it.
_FAREWELL = 2.0


class RollCall:
    """Finds out, through the store of a process group, which of its ranks are dead, stopped or behind.

    A thread of every rank looks into the store twice a second. After a failure its rank calls: all that can write down
    where they are, wait for the others and come to a verdict of their own. No port is opened but the connection to the
    store. A store that is gone or silent means that its host is: rank 0, or the launcher under torchrun.

    Args:
        group: The group.
        name: Keys of this roll call in the store, the same text on all ranks and in no other roll call.
        progress: Returns the number of buckets that this rank has begun; None where ranks do not count any.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, progress: Callable[[], int] | None = None) -> None:
        self._rank, self._ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        # a connection of its own: one that hangs on a stopped host must not hold up what others do with the store
        self._store, self._name = group.get_group_store().clone(), name
        self._progress = progress or int
        self._text: str | None = None
        self._closing = False
        self._verdict = ""
        self._called, self._written_down, self._over = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="robustdist-roll-call", daemon=True)
        self._thread.start()

    @property
    def called(self) -> bool:
        """Whether any rank has called, so that this one waits for others in vain."""
        return self._called.is_set()

    def call(self, text: str | None = None) -> str:
        """Hold the roll call, or join the one that another rank began, and return which ranks are missing.

        Args:
            text: What went wrong on this rank, if anything did; the other ranks see it.
        """
        self._text = text
        self._called.set()
        # a host that is stopped takes what is sent and never says a word
        if self._written_down.wait(PATIENCE) and self._over.wait(PATIENCE + _FAREWELL + 2 * _PERIOD):
            return self._verdict
        return _host_is_gone(text)

    def tell(self, error: Exception) -> None:
        """Let the other ranks know why this one ends, and add to ``error`` what is known of them.

        A rank whose connection has broken so learns which one failed, and its text. What all ranks raise together is
        not told. A :class:`UsageError` gets the rank into its sentence.
        """
        if getattr(error, "shared", False):
            return
        rank = self._ranks[self._rank]
        if isinstance(error, UsageError):
            error.args = (f"{error} (process {rank})",)
        text = "".join(traceback.format_exception_only(error)).strip()
        verdict = self.call(text)
        if verdict != f"all ranks answer:\nrank {rank}: {text}":
            error.args = (f"{error}\n{verdict}",)

    def close(self) -> None:
        """End the thread; whoever calls from now on is told that this rank has closed."""
        self._closing = True
        if not self.called:  # else it has ended, or hangs on a stopped host for ever
            self._called.set()
            self._thread.join(_FAREWELL)

    def _watch(self) -> None:
        try:
            while not self._called.wait(_PERIOD) and not self._written("called"):
                pass
            if self._closing:
                self._answer()
            else:
                self._hold()
        except RuntimeError as error:  # what a store raises whose host has died, or has left after its own verdict
            self._verdict = self._verdict or _host_is_gone(self._text or str(error))
        for event in (self._called, self._written_down, self._over):
            event.set()

    def _answer(self) -> None:
        answer = {"closed": self._closing, "begun": self._progress(), "text": self._text}
        self._write(f"here/{self._rank}", json.dumps(answer))

    def _write(self, key: str, value: str = "") -> None:
        self._store.set(f"{self._name}/{key}", value)

    def _written(self, key: str) -> bool:
        return bool(self._store.check([f"{self._name}/{key}"]))

    def _hold(self) -> None:
        self._write("called")
        self._called.set()
        self._answer()
        self._written_down.set()
        everybody = range(len(self._ranks))
        missing = self._wait_for("here", everybody, PATIENCE)
        present = [rank for rank in everybody if rank not in missing]
        answers = {rank: json.loads(self._store.get(f"{self._name}/here/{rank}")) for rank in present}
        self._verdict = self._describe(answers, missing)
        self._write(f"read/{self._rank}")
        self._wait_for("read", (rank for rank in present if not answers[rank]["closed"]), _FAREWELL)

    def _wait_for(self, key: str, ranks: Iterable[int], seconds: float) -> list[int]:
        """Return the ranks that have not written ``key`` in time."""
        end, missing = monotonic() + seconds, list(ranks)
        while missing := [rank for rank in missing if not self._written(f"{key}/{rank}")]:
            if monotonic() > end:
                break
            sleep(0.02)
        return missing

    def _describe(self, answers: dict[int, dict[str, Any]], missing: list[int]) -> str:
        closed = [rank for rank, answer in answers.items() if answer["closed"]]
        most = max(answer["begun"] for answer in answers.values())
        # whoever is late where a rank is missing is so because of it
        behind = [rank for rank, answer in answers.items() if answer["begun"] < most and not missing and not closed]
        found = [f"{self._names(missing)} not answer, dead or stopped"] if missing else []
        found += [f"{self._names(closed)} not take part any more, closed"] if closed else []
        found += [f"{self._names(behind)} not come to bucket {most}, busy or stuck elsewhere"] if behind else []
        texts = [f"rank {self._ranks[rank]}: {answer['text']}" for rank, answer in answers.items() if answer["text"]]
        return "; ".join(found or ["all ranks answer"]) + (":\n" + "\n".join(texts) if texts else "")

    def _names(self, ranks: list[int]) -> str:
        names = ", ".join(str(self._ranks[rank]) for rank in ranks)
        return f"rank {names} does" if len(ranks) == 1 else f"ranks {names} do"


def _host_is_gone(text: str | None) -> str:
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = "the launcher" if by_launcher else "rank 0"
    return f"{host} does not answer, dead or stopped: it hosts the store in which the others could be asked: {text}"
