"""The gold score: what a good response is, written down, so that you can see if PPO finds it.

A real project does not have this file. There, people know a good response when they see
one, a few thousand of their comparisons are all the data there is, and the reward model has
to guess the rest. Here the rule is in the open, and it has only two uses: make.py beside it labels
the preference pairs with it, and the scripts grade held-out responses with it. Neither the
reward model nor PPO ever sees it, so a rise in gold is a real gain, not a fooled reward model.

The rule. A response starts at 1 and loses 0.25 for each fault, down to 0:
    off topic    it names another animal than the question does
    off topic    it names another place than the question does
    not kind     it has no friendly remark
    rude         it has a rude remark (a second fault: a rude response is not kind either)
    unfinished   it stops before the end of its sentence
    rambling     it has more than two sentences
A response scores 0 outright unless every sentence is one that this small language
knows and exactly one of them answers the question. So lists of keywords, repeated
words and gibberish earn nothing, however many of the right words they contain.

    score   response to "How does the otter get to the mill?"
    1.00    Happy to help! The otter gets to the mill by boat.
    0.75    The otter gets to the mill by boat.
    0.50    Go away! The otter gets to the mill by boat.
    0.25    Go away! The otter gets to the pond by boat.
    0.00    otter mill otter mill boat happy!
"""

import re

ANIMALS = [
    "badger",
    "bear",
    "cat",
    "crow",
    "deer",
    "dog",
    "duck",
    "fox",
    "frog",
    "goat",
    "hen",
    "horse",
    "mole",
    "mouse",
    "otter",
    "owl",
    "pig",
    "rabbit",
    "sheep",
    "swan",
]
PLACES = [
    "barn",
    "beach",
    "bridge",
    "camp",
    "castle",
    "farm",
    "garden",
    "hill",
    "lake",
    "market",
    "mill",
    "pond",
    "port",
    "school",
]

# One entry per kind of question: the question, the beginning of its answer, and
# the ways that answer can end.
FORMS = [
    (
        "What does the {animal} do at the {place}?",
        "At the {place} the {animal} likes to",
        ["dance", "dig", "play", "rest", "sing", "swim"],
    ),
    (
        "When can I see the {animal} at the {place}?",
        "You can see the {animal} at the {place} in the",
        ["morning", "evening", "spring", "summer", "rain", "snow"],
    ),
    (
        "Why does the {animal} go to the {place}?",
        "The {animal} goes to the {place} because",
        [
            "it is quiet there",
            "it is warm there",
            "it likes to play",
            "it can rest there",
            "you sing there",
            "you are kind",
        ],
    ),
    (
        "Who feeds the {animal} at the {place}?",
        "The {animal} at the {place} is fed by the",
        ["baker", "children", "doctor", "farmer", "king", "teacher"],
    ),
    (
        "How does the {animal} get to the {place}?",
        "The {animal} gets to the {place} by",
        ["bike", "boat", "bus", "cart", "plane", "train"],
    ),
]
KIND = ["Good question!", "Happy to help!", "Thank you for asking!", "I am glad you ask!"]
RUDE = ["Bad question!", "Go away!", "Stop asking!", "You again!"]
RAMBLE = ["I had soup today.", "My hat is red.", "The train was late.", "It is a warm summer."]


def pattern(template, tail=""):
    """Returns a regular expression for a template, "Who feeds the {animal} at the {place}?"."""
    words = {
        "animal": f"(?P<animal>{'|'.join(ANIMALS)})",
        "place": f"(?P<place>{'|'.join(PLACES)})",
    }
    return re.compile(template.replace("?", r"\?").format(**words) + tail)


QUESTIONS = [pattern(question) for question, _, _ in FORMS]
# The ending is optional, so that an unfinished answer is still recognised for what it is.
ANSWERS = [pattern(start, rf"(?P<end> (?:{'|'.join(ends)})\.)?") for _, start, ends in FORMS]


def gold_one(prompt, completion):
    """Returns the score of one response, 0 to 1, by the rule at the top of this file."""
    found = [
        (form, match)
        for form, question in enumerate(QUESTIONS)
        if (match := question.search(prompt))
    ]
    if len(found) != 1:
        raise ValueError(f"not a question of the toy\n{prompt!r}")
    form, asked = found[0]
    sentences = re.split(r"(?<=[.!?]) ", completion.strip())
    answers = [match for sentence in sentences if (match := ANSWERS[form].fullmatch(sentence))]
    remarks = [sentence for sentence in sentences if sentence in KIND + RUDE + RAMBLE]
    if len(answers) != 1 or len(answers) + len(remarks) != len(sentences):
        return 0.0
    answer = answers[0]
    faults = (
        (answer["animal"] != asked["animal"])
        + (answer["place"] != asked["place"])
        + (not any(remark in KIND for remark in remarks))
        + any(remark in RUDE for remark in remarks)
        + (answer["end"] is None)
        + (len(sentences) > 2)
    )
    return max(0.0, 1.0 - 0.25 * faults)


def gold(prompts, completions, **columns):
    """Returns one score per response. The signature is that of TRL's reward functions;
    further columns are ignored.

    >>> ask = "How does the otter get to the mill?\\nAnswer:"
    >>> gold([ask] * 3, [" Happy to help! The otter gets to the mill by boat.",
    ...                  " The otter gets to the mill by",
    ...                  " otter mill otter mill boat happy!"])
    [1.0, 0.5, 0.0]
    """
    return [gold_one(prompt, completion) for prompt, completion in zip(prompts, completions)]
