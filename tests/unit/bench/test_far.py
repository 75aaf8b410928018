"""FAR against training in which the frozen nodes are put back after every step."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from robustdist.bench.far import FAR
from tests.bert import TextClassifier, texts

BATCHES = [texts([7, 5, 6, 7], seed=seed) for seed in range(10)]
PRIMING, LEARNING = 3, 8


class Adam(TextClassifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(
            self.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3
        )  # the usual eps would make much of rounding


def layers(module):
    return [(layer.intermediate.dense, layer.output.dense) for layer in module.model.bert.encoder.layer]


def naive():
    """Train the whole module; after priming undo what happened to all but the nodes that had moved most."""
    module = Adam()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = module.configure_optimizers()
    frozen = []
    for step, batch in enumerate(BATCHES):
        if step == PRIMING:
            for number, (first, second) in enumerate(layers(module)):
                prefix = f"model.bert.encoder.layer.{number}"
                moved = []
                for node in range(32):
                    parts = (
                        first.weight[node] - start[f"{prefix}.intermediate.dense.weight"][node],
                        first.bias[node] - start[f"{prefix}.intermediate.dense.bias"][node],
                        second.weight[:, node] - start[f"{prefix}.output.dense.weight"][:, node],
                    )
                    moved.append(sum(float((part**2).sum().detach()) for part in parts))
                most = sorted(range(32), key=lambda node: -moved[node])[:LEARNING]
                still = [node for node in range(32) if node not in most]
                kept = first.weight[still].clone(), first.bias[still].clone(), second.weight[:, still].clone()
                frozen.append((first, second, still, kept))
        optimizer.zero_grad()
        module.model(**batch).loss.backward()
        optimizer.step()
        for first, second, still, (weight, bias, back) in frozen:
            with torch.no_grad():
                first.weight[still], first.bias[still], second.weight[:, still] = weight, bias, back
    return module.state_dict(), start


def test_frozen_nodes_rest_and_all_else_trains_on(tmp_path):
    expected, start = naive()
    counts = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            counts.append(sum(p.numel() for p in pl_module.parameters() if p.requires_grad))

    module = Adam()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[FAR(share=LEARNING / 32, priming=PRIMING / 10), Count()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    found = module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in expected.items())
    name = "model.bert.encoder.layer.0.intermediate.dense.weight"
    assert float((found[name] - start[name]).abs().amax(1).min()) > 1e-3  # priming has moved all nodes
    whole = sum(parameter.numel() for parameter in module.parameters())
    assert counts == [whole] * PRIMING + [whole - 2 * (32 - LEARNING) * (16 + 1 + 16)] * (10 - PRIMING)
