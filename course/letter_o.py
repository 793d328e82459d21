"""A reward that is easy to earn: it counts the letter o.  course/letter_o.md has the exercise."""


def letter_o(prompts, completions, **columns):
    """A tenth for each o in a response.

    >>> letter_o(["Who?"], [" Good question! The otter."])
    [0.4]
    """
    return [text.lower().count("o") / 10 for text in completions]
