"""Flags: how they are declared, which there are, and which go together.

declaring  a parser, its flags, a preset's values
ppo_flags  the options of ppo.py beyond the papers'
refusals, ppo_rules   what flags cannot do together
presets    DeepSpeed-Chat's recipes
"""
