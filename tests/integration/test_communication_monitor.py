"""What the monitor logs is what the strategy counted."""

from __future__ import annotations

import pytest

from robustdist import UsageError
from robustdist.callbacks import CommunicationMonitor
from robustdist.comm import QSGD
from robustdist.comm.controller import FixedBits
from robustdist.core.testing import toy_images
from tests.integration.support import Classifier, Memory, loader, run
from tests.integration.test_compressed_ddp import Odd, compressed


def test_bytes_per_step_are_logged(tmp_path):
    def collect(trainer, module):
        return trainer.logger.entries, trainer.strategy.comm_stats()

    (entries, stats), _ = run(
        tmp_path, Classifier(Odd()), loader(*toy_images(96)), strategy=compressed(QSGD(), bits=FixedBits(4)),
        processes=2, callbacks=[CommunicationMonitor()], logger=Memory(), log_every_n_steps=1,
        collect=collect,
    )  # fmt: skip
    logged = [entry for entry in entries if "comm/ratio" in entry]
    assert len(logged) == stats["steps"] == 6
    assert sum(entry["comm/bytes_sent"] for entry in logged) == stats["bytes_sent"]
    for entry in logged:
        assert entry["comm/ratio"] == pytest.approx(entry["comm/bytes_dense"] / entry["comm/bytes_sent"])
        assert 5 < entry["comm/ratio"] < 8
        assert entry["comm/wait_ms"] > 0
        assert entry["comm/bits"] == 4


def test_a_strategy_that_does_not_count_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"CommunicationMonitor has nothing to log with SingleDeviceStrategy"):
        run(tmp_path, Classifier(), loader(*toy_images(8)), callbacks=[CommunicationMonitor()])
