"""A run, from its first line to its exit code.

run            deals out the steps, evaluates, logs, keeps the best model, saves, and ends
launch         makes this process a rank
output_folder  who writes there; args.json
checkpoints    a run that stops goes on where it stood
"""
