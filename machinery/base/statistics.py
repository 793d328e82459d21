"""Statistics that a run reports."""


def wilson_interval(share, count, z=1.96):
    """Returns the 95 % confidence interval [low, high] of a share in `count` trials: Wilson 1927.

    >>> [round(x, 3) for x in wilson_interval(0.75, 100)]
    [0.657, 0.825]
    """
    scale = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z / scale * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return [middle - half, middle + half]
