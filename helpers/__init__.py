"""What stands on common.py, and what nobody has to open to understand RLHF: one named call each.

decoding           what makes sampling fast
shared_prompts     a prompt computed once for several responses
judging            who scores the responses
checks             what the models themselves must show before a run trains on
metrics            what a rollout and its updates were like
evaluation         held-out prompts and pairs, and samples.jsonl
microscope         tokens.jsonl
"""
