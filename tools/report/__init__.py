"""The parts of tools/look.py.

runs      reads what a run has left in its folder
verdicts  says in words how a run looks
numbers   how good the judge is, which samples were gamed
samples   texts of the page: the same prompt before and after, the numbers of single tokens
pictures  draws curves and the judge's figures as SVG
page      puts the page together: page.html, page.css, page.js
"""
