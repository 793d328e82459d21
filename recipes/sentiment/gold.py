"""The gold score of this task: how positive a response is, by a lexicon.

    --gold_fn recipes/sentiment/gold.py:gold          logged, and never trained on
    --reward_fn recipes/sentiment/gold.py:gold        or trained on, with no judge in between

VADER [Hutto 2014] adds up what people said of each word, with rules for "not", "very" and
capitals, and gives a number from -1 (negative) to 1 (positive). What it does not know is not there:
a list of happy words is a very positive text for it.
"""

import functools


@functools.cache
def analyzer():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # pip: vaderSentiment

    return SentimentIntensityAnalyzer()


def sentiment(text):
    """Returns the compound score of a text, from -1 to 1; 0 for one without a known word.

    >>> sentiment("I love the sea."), sentiment("I do not love the sea."), sentiment("")
    (0.6369, -0.5216, 0.0)
    """
    return analyzer().polarity_scores(text)["compound"]


def gold(prompts, completions, **columns):
    """Returns the sentiment of each response: lists of messages, as the prompts are chats."""
    return [sentiment(completion[-1]["content"]) for completion in completions]
