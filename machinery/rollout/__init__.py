"""What PPO's options do: each is one named call in ppo.py.

decoding           what makes sampling fast
checks             what PPO checks, mostly in its first step
shared_prompts     a prompt computed once for several responses
judging            who scores the responses
rollout_metrics    what a rollout and an evaluation were like; samples, pair_scores
microscope         tokens.jsonl
ema                --enable_ema
"""
