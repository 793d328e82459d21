"""Statistics that a run reports."""

import math
from statistics import fmean, pstdev


def wilson_interval(share, count, z=1.96):
    """Returns the 95 % confidence interval [low, high] of a share in `count` trials: Wilson 1927.

    As R's prop.test(correct=FALSE) prints it. Half of ten says next to nothing, half of a thousand
    "a coin"; ten of ten is not certainty: the plain normal interval would say [1, 1].

    >>> for share, count in ((0.5, 10), (0.5, 1000), (1, 10), (0, 10)):
    ...     print([round(x, 4) for x in wilson_interval(share, count)])
    [0.2366, 0.7634]
    [0.4691, 0.5309]
    [0.7225, 1.0]
    [0.0, 0.2775]
    """
    scale = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z / scale * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return [abs(middle - half), middle + half]  # below 0 it is only by rounding


def mean_interval(values):
    """Returns the 95 % confidence interval [low, high] of a mean: mean -+ 1.96 s / sqrt(n).

    s divides by n - 1. It is too narrow for few values, and says nothing where all are equal.

    >>> [round(x, 3) for x in mean_interval([0.0, 1.0] * 50)]
    [0.402, 0.598]
    """
    mean, count = fmean(values), len(values)
    half = 1.96 * pstdev(values) / max(count - 1, 1) ** 0.5
    return [mean - half, mean + half]


def best_of(values, k):
    """Returns the expected largest of k of these n values, drawn without replacement. k <= n

        sum over i of  C(i, k - 1) / C(n, k) * v_i        v_0 <= v_1 <= ... <= v_{n-1}

    C(i, k - 1) of the C(n, k) draws have v_i as their largest. As an estimate for k new samples it
    is unbiased. Of values that are 0 or 1, c of them 1, it is pass@k, 1 - C(n - c, k) / C(n, k)
    [Chen 2021] eq. 1.

    >>> best_of([0.0, 1.0, 0.0, 0.0], 2), 1 - math.comb(3, 2) / math.comb(4, 2)
    (0.5, 0.5)
    >>> abs(best_of([1.0] * 2 + [0.0] * 4, 3) - (1 - math.comb(6 - 2, 3) / math.comb(6, 3))) < 1e-12
    True
    """
    chances = [math.comb(i, k - 1) / math.comb(len(values), k) for i in range(len(values))]
    return sum(chance * value for chance, value in zip(chances, sorted(values)))
