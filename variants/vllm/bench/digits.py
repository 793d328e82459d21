"""A reward for the trial of ../README.md: the share of digits in a response."""


def digits(prompts, completions, **columns):
    """Returns a float for each response, 0 for an empty one."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]
