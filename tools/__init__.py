"""Programs for people: look.py, talk.py, estimate.py, export.py, and the folders of two of them.

report/ makes look.py's page, chat/ is what talk.py does.
"""
