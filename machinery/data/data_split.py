"""Decides which rows of the data a step takes where --data_split does not say."""

from pathlib import Path

import numpy as np

from machinery.base import records

STAGES = ("sft", "reward", "ppo")  # in the order of --data_split
SHARED = [2.0, 4.0, 4.0]  # [DeepSpeed-Chat]


def default(args, stage, serves_all):
    """Returns --data_split of a run that names neither it nor a preset.

    Steps that share a source take disjoint shares. A later step shares it if a model that it starts
    from was trained on it (its args.json): it keeps to that run's --data_split. Step 1 shares its
    one source if `serves_all`: it has the columns for all steps. Else a step takes all rows.
    """
    place, data = STAGES.index(stage), resolved(args.data_path)
    models = [value for key, value in vars(args).items() if key.endswith("model_name_or_path")]
    for model in models:
        for folder in [model] if isinstance(model, str) else model or []:
            paths, split = trained_on(folder)
            if data & resolved(paths) and split[place]:
                return split
    if stage == "sft" and len(data) == 1 and serves_all:
        return SHARED
    return [float(name == stage) for name in STAGES]


def trained_on(folder):
    """Returns --data_path and --data_split of the run that made a model; [], SHARED if unknown."""
    before = records.of_model(folder)
    known = "data_path" in before and "data_split" in before
    return (before["data_path"], before["data_split"]) if known else ([], SHARED)


def resolved(paths):
    """Returns the set of absolute paths (of hub names, too: as if they were files)."""
    return {str(Path(path).resolve()) for path in paths}


def share_of(rows, data_split, stage):
    """Returns the stage's share of the rows, in their order."""
    order = np.random.default_rng(0).permutation(len(rows))
    ends = np.cumsum([0, *data_split]) / sum(data_split) * len(order)
    start, end = ends.round().astype(int)[STAGES.index(stage) :][:2]
    return rows.select(np.sort(order[start:end]))


def in_words(args):
    """Returns which of its rows a step takes of the data, in words."""
    if sum(map(bool, args.data_split)) == 1:
        return "all rows"
    return f"this step's share, --data_split {','.join(f'{part:g}' for part in args.data_split)}"
