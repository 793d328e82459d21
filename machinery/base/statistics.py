"""Statistics that a run reports."""

import torch

from machinery.base import ranks


class TokenMeans:
    """Means of what an update reports, over all ranks' tokens, weighted as the losses are."""

    def __init__(self, *names):
        self.names = names
        self.reset()

    def reset(self):
        """Starts a step."""
        self.sums = torch.zeros(len(self.names), dtype=torch.float64)  # this rank's
        self.sums_before = self.sums.clone()  # as they were before this update
        self.tokens = self.ratio_max = 0.0
        self.updates = 0

    @torch.no_grad()
    def add(self, weight, ratio, *values):
        """Adds a micro-batch. weight, ratio and the values, in the order of names: (B, R)"""
        self.ratio_max = max(self.ratio_max, (ratio * (weight > 0)).max().item())
        self.sums += torch.stack([(value * weight).sum().double().cpu() for value in values])

    def end_update(self, total, target_kl):
        """Ends an update on tokens of weight `total`: was its approx_kl above --target_kl?"""
        moved = self.sums - self.sums_before
        self.sums_before = self.sums.clone()
        self.tokens += total
        self.updates += 1
        approx_kl = moved[self.names.index("approx_kl")]
        return bool(target_kl) and ranks.all_sum(approx_kl).item() / total > target_kl

    def of_all_ranks(self):
        """Returns {name: mean}, ratio_max, and the sum of the losses as `loss`."""
        means = dict(zip(self.names, (ranks.all_sum(*self.sums) / self.tokens).tolist()))
        ratio_max = max(ranks.all_gather_objects([self.ratio_max]))
        loss = means["actor_loss"] + means["critic_loss"]
        return {"loss": loss, **means, "ratio_max": ratio_max}


def wilson_interval(share, count, z=1.96):
    """Returns the 95 % confidence interval [low, high] of a share in `count` trials: Wilson 1927.

    >>> [round(x, 3) for x in wilson_interval(0.75, 100)]
    [0.657, 0.825]
    """
    scale = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z / scale * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return [middle - half, middle + half]
