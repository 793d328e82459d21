"""What stands on common.py, and what nobody has to open to understand RLHF: one named call each.

padding            what every model must show before it trains
answers            step 1's answers to held-out prompts: samples.jsonl
judged             step 2's held-out pairs: judge.jsonl
shared_prompts     a prompt computed once for several responses
functions          the user's own, which score responses
judging            who scores the responses of step 3
decoding           what makes step 3's sampling fast
checks             what step 3's models must show before a run trains on
metrics            what a rollout and its updates were like
evaluation         step 3's held-out prompts, answered and scored: samples.jsonl
microscope         tokens.jsonl
"""
