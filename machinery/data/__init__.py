"""Data: from files and hub names to tokenised rows.

sources     files, folders and hub datasets
formats     the columns that are known, and what a row of them holds
tokens      token ids of prompts, chats and responses
rows        the rows of a step: which, and what they hold
batching    which rows each optimizer step takes
"""
