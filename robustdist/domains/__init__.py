"""Several domains in one training: how much of each is sampled, and a sampler that draws so; without a Trainer."""

from robustdist.domains.dro import excess_losses, floored, next_potential, worst_mix
from robustdist.domains.loaders import find_domain_ids, with_sampler
from robustdist.domains.mixer import DomainMixer
from robustdist.domains.reference import fit_scaling_laws, predicted_loss
from robustdist.domains.sampler import DomainSampler
from robustdist.domains.sheared import multiplicative_ratios

__all__ = [
    "DomainMixer",
    "DomainSampler",
    "excess_losses",
    "find_domain_ids",
    "fit_scaling_laws",
    "floored",
    "multiplicative_ratios",
    "next_potential",
    "predicted_loss",
    "with_sampler",
    "worst_mix",
]
