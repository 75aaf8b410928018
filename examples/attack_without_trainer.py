"""Attack any classifier: no Trainer, inputs normalised as the model wants them, eps in pixel units."""

import torch
from torch import nn

from robustdist.attacks import FGSM, PGD
from robustdist.data import DigitsDataModule


def main() -> None:
    torch.manual_seed(0)
    data = DigitsDataModule(batch_size=1397)
    data.setup("fit")
    x, y = next(iter(data.train_dataloader()))
    x_val, y_val = next(iter(data.val_dataloader()))
    mean, std = float(x.mean()), float(x.std())

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model((x - mean) / std), y).backward()
        optimizer.step()

    # the images arrive normalised; eps stays in pixels because the attack knows mean and std
    inputs = (x_val - mean) / std
    for attack in (FGSM(eps=0.1, mean=mean, std=std), PGD(eps=0.1, steps=20, restarts=3, mean=mean, std=std)):
        x_adv = attack(model, inputs, y_val)
        moved = ((x_adv - inputs) * std).abs().max()
        accuracy = (model(x_adv).argmax(1) == y_val).float().mean()
        print(f"{type(attack).__name__}: accuracy {accuracy:.2f}, largest change {moved:.3f} pixels")


if __name__ == "__main__":
    main()
