"""The parts of tools/talk.py.

models    the models: those that write, and the one that scores
session   a dialogue as a person types it, and its commands
screen    shows responses as they are written
tables    means, and how often a model is better than another
"""
