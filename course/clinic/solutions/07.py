"""The log-prob that scoring stores for a token is that of the token before."""

import faults

SCRIPT = "ppo"
fault = faults.shifted
