"""What a reward function is given, and how several judges become one."""

import json
from types import SimpleNamespace

import torch
from test_reward_functions import RESPONSE

from machinery import judges


def response(**own):
    """Returns a response of two tokens as a rollout leaves it."""
    return {**RESPONSE, **own}


def test_a_reward_function_gets_the_columns_of_all_blended_sources():
    """Two sources with unlike columns: both columns are there for every row, None where a row has
    none. Not the columns of whichever row comes first."""
    rows = [response(extra='{"topic": "t"}'), response(prompt="b", extra='{"level": 2}')]
    given = judges.columns_for(lambda prompts, completions, topic, level: [], rows)
    assert given["prompts"] == ["Why?", "b"] and given["completions"] == [" So."] * 2
    assert (given["topic"], given["level"]) == (["t", None], [None, 2])


def test_a_reward_function_gets_chat_as_messages():
    """As TRL hands it over: a list of messages for each prompt, and one message of the assistant
    for each response."""
    question = [{"role": "user", "content": "Why?"}]
    row = response(prompt=json.dumps(question), chat=True)
    given = judges.columns_for(lambda **columns: [], [row])
    assert given["prompts"] == [question]
    assert given["completions"] == [[{"role": "assistant", "content": " So."}]]


def test_a_reward_function_may_score_every_token():
    """A list of one number a token stands on the tokens, one number on the last token;
    `completion_ids` says which they are."""
    rows = [response(response_ids=[5, 6, 1]), response(response_ids=[7, 1])]
    mask, last = torch.tensor([[[1, 1, 1], [1, 1, 0]], [[0, 0, 1], [0, 1, 0]]])
    batch = SimpleNamespace(responses=rows, response_mask=mask, last=last)

    def tokens(prompts, completions, completion_ids, **columns):
        return [list(map(float, ids)) for ids in completion_ids]

    judges.call_functions({"tokens": tokens, "whole": lambda **columns: [2.0, 3.0]}, rows)
    assert judges.function_scores(batch, "tokens").tolist() == [[5, 6, 1], [7, 1, 0]]
    assert judges.function_scores(batch, "whole").tolist() == [[0, 0, 2], [0, 3, 0]]


def test_a_function_with_a_model_of_its_own_keeps_no_graph():
    """It is called for all responses of a step, whose graphs would be held at once."""
    rows = [response()]
    judges.call_functions({"f": lambda **columns: [float(torch.is_grad_enabled())]}, rows)
    assert rows[0]["function_scores"] == {"f": [0.0]}


def test_several_judges_are_summed():
    """One judge scores the whole response (2 on its last token), another each token (0.5 each).
    What each has said is noted."""
    both = [lambda batch: torch.tensor([[0.0, 2.0]]), lambda batch: torch.tensor([[0.5, 0.5]])]
    given = dict(reward_fn=["a.py:right"], reward_model_name_or_path=["b/kind"])
    batch = SimpleNamespace(responses=[{}])
    scores = judges.sum_and_note(SimpleNamespace(**given), both)(batch)
    assert scores[0].tolist() == [0.5, 2.5]
    assert batch.responses == [{"reward_1_right": 2.0, "reward_2_kind": 1.0}]
