"""Flags: how they are declared, which there are, and which go together.

declaring  a parser, the flags of all scripts, and how they get their values
recipes    --preset NAME and @FILE: which is taken, and rows that the ranks divide
ppo_flags  the options of ppo.py beyond the papers', and checks of its models
rules      one table of what flags cannot do together
"""
