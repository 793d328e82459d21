"""Flags: how they are declared, which there are, and which go together.

declaring  a parser, the flags of all scripts, and how presets fill them
ppo_flags  the options of ppo.py beyond the papers', and checks of its models
rules      one table of what flags cannot do together
"""
