"""Two rewards for long responses, beside a reward model.  course/class.md has the exercise."""


def bonus(prompts, completions, **columns):
    """A tenth for each word of a response.

    >>> bonus(["Who?"], [" Good question! The otter."])
    [0.4]
    """
    return [len(text.split()) / 10 for text in completions]


def large_bonus(prompts, completions, **columns):
    """Three tenths for each word."""
    return [3 * each for each in bonus(prompts, completions)]
