"""A policy of your own: every layer keeps at least a given share of its energy.

    compression = greco.LGreco(
        model.named_parameters(), family="topk", policy=KeepEnergy(0.5), interval=100
    )

A policy runs on rank 0. It sees what every option of every layer would lose, summed over all ranks
and the samples of an interval, and returns one option for each layer. Broadcasting, agreement,
residuals and the log are the controller's business.
"""

import numpy as np

import hvd_greco as greco


class KeepEnergy(greco.Policy):
    """The option of fewest bytes that keeps ``share`` of the squared norm, layer by layer."""

    name = "keep-energy"

    def __init__(self, share):
        if not 0 < share <= 1:
            raise greco.ConfigError(f"share: {share} is not in (0, 1]")
        self.share = share

    def describe(self):
        return f"keep-energy {self.share:g}"  # all ranks must agree on it

    def decide(self, evidence):
        choice, reasons = [], {}
        for options in evidence.options:
            name = options.layer.name
            sums = evidence.sums[name]
            enough = sums.errors <= (1 - self.share) * sums.energy  # dense always is
            place = int(np.where(enough, options.bytes, np.inf).argmin())
            choice.append(place)
            reasons[name] = f"loses {sums.errors[place] / max(sums.energy, 1e-300):.0%}"
        return greco.Decision(np.array(choice), f"{self.share:.0%} of the energy", reasons)
