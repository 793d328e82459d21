"""The parts of tools/look.py.

runs      reads what a run has left in its folder; which flags differ between runs
verdicts  judges how a run looks; verdicts.ini has the words
numbers   how good the judge is, which samples were gamed
answers   one prompt, answered by all models
samples   the numbers of single tokens, the judge, the samples before and after
pictures  draws curves and the judge's figures as SVG
text      makes text and numbers fit for the page
page      puts the page together: page.html, page.css, page.js
"""
