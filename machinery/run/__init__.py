"""A run, from its first line to its exit code.

run            deals out the steps, evaluates, logs, saves
launch         makes this process a rank
output_folder  who writes there; args.json
checkpoints    a run that stops goes on where it stood
best           --keep_best: a copy of the best model so far
crash          how a run ends
logs, plots    metrics.jsonl, samples.jsonl, the screen, curves.png
"""
