"""--kl_target: a KL penalty that adapts to hold the KL at a target."""


class KlController:
    """The penalty for a nat of KL: --kl_coef, or one that adapts, kept in the checkpoints."""

    def __init__(self, args, state):
        self.args, self.state = args, state
        state["kl_coef"] = args.kl_coef

    @property
    def coef(self):
        return self.state["kl_coef"] if self.args.kl_target else self.args.kl_coef

    def update(self, kl, trains):
        """Adapts to the KL of a rollout, in nats per response, once the actor trains."""
        if self.args.kl_target and trains:
            self.state["kl_coef"] = adapt_kl_coef(self.coef, kl, self.args.kl_target)


def adapt_kl_coef(coef, kl, target, gain=0.1):
    """Raises the penalty when KL is above its target, lowers it below. Ziegler et al. 2019, 2.2.

    >>> round(adapt_kl_coef(0.1, kl=12.0, target=6.0), 6)  # the error is clipped to 0.2
    0.102
    """
    return coef * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))
