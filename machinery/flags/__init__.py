"""Flags: how they are declared, which there are, and which go together.

declaring  a parser, the flags of all scripts, recipes, --resume, and the rules of all
ppo_flags  the options of ppo.py beyond the papers', its rules, and checks of its models
"""
