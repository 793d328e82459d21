"""The machine room: what nobody has to open to understand RLHF on DeepSpeed.

    base      which rank this is, refusals in words, progress, records, statistics
    engine    DeepSpeed: its config, ZeRO-3, repairs, offloading, tensor parallelism, throughput
    models    folders of models, LoRA, saving, the model card, what forwards of architectures take
    data      formats, sources, tokens, rows
    flags     declaring flags, those of all scripts, PPO's, the rules between them, presets
    -------   common.py stands here: it imports the rooms above, and the rooms below import it
    run       a run from start to end: launch, output folder, checkpoints, logs, plots
    rollout   decoding, shared prompts, judges, metrics, the microscope, EMA

A module imports from its own room and from those above it, and never a script
(tests/docs/test_house.py).
"""
