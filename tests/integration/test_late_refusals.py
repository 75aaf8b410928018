"""A batch after the first is refused on one of two processes: both end soon, with the sentence and the rank."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from robustdist.attacks import PGD
from robustdist.callbacks import AdversarialTraining
from robustdist.comm import QSGD
from robustdist.core.testing import run_ranks
from robustdist.strategies import CompressedDDPStrategy

from .support import Quiet, make_trainer, shares

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

SENTENCE = r"the targets span \[.*99\] but the model has 4 classes"


class Late(Quiet):
    def __init__(self, data: DataLoader, bad_rank: int):
        super().__init__()
        self.data, self.bad_rank = data, bad_rank

    def train_dataloader(self):
        return self.data

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == self.bad_rank:
            batch[1][0] = 99


@pytest.mark.parametrize(("compressed", "bad_rank"), [(False, 0), (False, 1), (True, 1)])
def test_the_other_process_ends_with_the_sentence_and_the_rank(tmp_path, images, compressed, bad_rank):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def train(rank):
        # as a launcher of its own does on every machine; rank 0 hosts the store, which ends with it
        dist.destroy_process_group()
        os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        limit = timedelta(minutes=30)
        strategy = CompressedDDPStrategy(QSGD(), timeout=limit) if compressed else DDPStrategy(timeout=limit)
        callback = AdversarialTraining(attack=PGD(eps=0.1, steps=1))
        trainer = make_trainer(1, num_nodes=2, strategy=strategy, callbacks=[callback], default_root_dir=tmp_path)
        try:
            trainer.fit(Late(shares(*images(64), 4), bad_rank))
        except Exception as error:
            return type(error).__name__, str(error), trainer.global_step
        return None

    results = run_ranks(train)
    kind, text, _ = results[bad_rank]
    assert kind == "UsageError"
    assert re.match(SENTENCE, text)
    assert f"rank {bad_rank}: " in text if compressed else text.endswith(f"(process {bad_rank})")
    kind, text, steps = results[1 - bad_rank]
    assert (kind, steps) == ("RuntimeError", 2)
    assert re.search(rf"rank {bad_rank}: robustdist.errors.UsageError: {SENTENCE}", text), text
