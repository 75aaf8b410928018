"""Single-step training from strong noise."""

from __future__ import annotations

from robustdist.attacks.base import Attack
from robustdist.attacks.noise_fgsm import NoiseFGSM
from robustdist.objectives.pgd_at import PGDAT

__all__ = ["NFGSM"]


class NFGSM(PGDAT):
    """Train on one FGSM step from noise larger than the ball, without projecting back.

    At the cost of :class:`FGSMRS` it overfits catastrophically much later. The attack is
    :class:`~robustdist.attacks.NoiseFGSM` with the radius of the user's attack; ``step_size_schedule`` ramps the step.

    Args:
        noise: Size of the noise over the radius.
        clip_noise: Clip the noise to the image box, as the released code does.

    References:
        de Jorge et al., "Make Some Noise: Reliable and Efficient Single-Step Adversarial Training".
    """

    def __init__(self, noise: float = 2.0, clip_noise: bool = True) -> None:
        NoiseFGSM(noise=noise)  # refuses what the attack would refuse
        self.noise = noise
        self.clip_noise = clip_noise

    def adapt(self, attack: Attack) -> Attack:
        """Return the noisy step with radius, units and loss of the user's attack."""
        return NoiseFGSM(
            norm=attack.norm,
            eps=attack.eps,
            noise=self.noise,
            clip_noise=self.clip_noise,
            bounds=attack.bounds,
            mean=attack.mean,
            std=attack.std,
            attack_loss=attack.attack_loss,
            model_mode=attack.model_mode,
            seed=attack.seed,
        )
