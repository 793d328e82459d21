"""What stands on common.py, and what nobody has to open to understand RLHF: one named call each.

checks             what the models must show: before they train, and in step 3's first update
rollout            what makes step 3's sampling fast
shared_prompts     a prompt computed once for several responses
judges             who scores the responses: reward models, and the user's own functions
evaluation         held-out rows: samples.jsonl, judge.jsonl, tokens.jsonl
metrics            what a rollout and its updates were like
"""
