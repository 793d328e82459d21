"""The machine room: what nobody has to open to understand RLHF on DeepSpeed.

    base      which rank this is, refusals in words, progress, records, statistics
    engine    DeepSpeed: its config, ZeRO-3, repairs, offloading, tensor parallelism, throughput
    models    folders of models, LoRA, saving, what forwards of architectures take
    data      formats, sources, tokens, rows
    flags     declaring flags, those of all scripts, PPO's, the rules between them, recipes
    run       a run from start to end: launch, output folder, checkpoints, logs, plots

A module imports from its own room and from those above it in this list. common.py stands on all of
them, helpers/ on common.py, and the scripts on top
(tests/docs/test_house.py).
"""
