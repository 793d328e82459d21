"""What stands on common.py, and what nobody has to open to understand RLHF: one named call each.

decoding           what makes sampling fast
checks             what the models themselves must show before a run trains on
shared_prompts     a prompt computed once for several responses
judging            who scores the responses
rollout_metrics    what a rollout and an evaluation were like; samples, pair_scores
microscope         tokens.jsonl
"""
