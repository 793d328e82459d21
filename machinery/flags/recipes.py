"""Recipes: the flags that a run takes besides those of its command line.

A recipe is a flags file: one flag a line, and `#` begins a comment. --preset NAME takes
recipes/NAME/SCRIPT.flags. The toy is a dict, TOY, in each script. The flags of @FILE, any other
such file, override the recipe's, and the command line overrides both, wherever a flag stands.
"""

import re
import shlex
from pathlib import Path

from machinery.base import ranks, records
from machinery.base.refused import Refused, nearest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes"
FOR_MODELS = "qwen2.5-0.5b"  # taken where a model is named, and no recipe
# A comment, or as group 1 what is none though a # may stand in it: an escape, or a quotation
COMMENT = r"""(\\.|"[^"]*"|'[^']*')|(?:^|\s)#.*"""
ROLES = "", "actor_", "critic_"  # of the models that are trained
ROWS = {f"per_device_{work}_batch_size" for work in ("train", "generation", "training")}
# A flag that goes with others of its recipe: it is dropped where one of them is given later.
GOES_WITH = {
    "gold_fn": {"data_path"},
    "columns": {"data_path"},
    "max_steps": {"num_train_epochs"},
    "rows_of_all_ranks": ROWS,
}


# ---- Reading ----
def stated(parser, words):
    """Returns {flag: value} of the flags that stand in `words`, without defaults.

    A number out of its flag's range is refused. NaN is in no range.
    """
    args = vars(parser.parse_args(words))
    names = args.keys() & {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    for name in names:
        flag, given = parser._option_string_actions[f"--{name}"], args[name]
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, (int, float)) and not flag.least <= value <= flag.most:
                most = f" and at most {flag.most}" if flag.most < 1e300 else ""
                limits = f"must be at least {flag.least}{most}."
                raise Refused("out-of-range", f"--{name} {value} {limits}")
    return {name: args[name] for name in names}


def read(parser, recipe):
    """Returns {flag: value} of a recipe: a flags file, or the toy's dict.

    What is wrong in a file is refused with its line. What begins with toy/ in a recipe lies in the
    folder of this project.
    """
    found, place = {}, "TOY" if isinstance(recipe, dict) else recipe
    for number, line in enumerate(lines_of(recipe), 1):
        try:
            words = shlex.split(re.sub(COMMENT, r"\1", line))
            words = [str(ROOT / word) if word.startswith("toy/") else word for word in words]
            own = stated(parser, words) if words else {}
            if twice := found.keys() & own.keys():
                raise ValueError(f"--{twice.pop()} stands above, too.")
        except (ValueError, Refused) as error:
            raise Refused("flags-file", f"{place}, line {number}: {error}") from error
        found |= own
    return found


def lines_of(recipe):
    """Returns the lines of a flags file, or those that would say what the toy's dict says."""
    if isinstance(recipe, dict):
        lines = []
        for flag, value in recipe.items():
            values = value if isinstance(value, list) else [value] * (value is not True)
            if value is not None and value is not False:  # else the flag's own default
                lines.append(shlex.join([f"--{flag}", *map(str, values)]))
        return lines
    try:
        return Path(recipe).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        words = f"@{recipe} cannot be read: {error}\n  {nearest(Path(recipe))}"
        raise Refused("flags-file", words) from error


def merged(layers):
    """Returns {flag: value} of several such dicts, of which each overrides those before it."""
    values = {}
    for layer in layers:
        for flag, others in GOES_WITH.items():
            if others & layer.keys():
                values.pop(flag, None)
        values |= layer
    return values


# ---- Which recipe ----
def names(script):
    """Returns what --preset may be for a script."""
    return ["toy", *sorted(file.parent.name for file in FOLDER.glob(f"*/{script}.flags"))]


def choose(script, stated):
    """Returns the name of the recipe that is taken, and in words why: "" if it was named.

    stated: {flag: value}, of the command line and of @FILEs.
    """
    if stated.get("preset"):
        return stated["preset"], ""
    models = [*filter(None, (stated.get(f"{role}model_name_or_path") for role in ROLES))]
    for model in models:
        name = records.of_model(model).get("preset")
        if name in names(script):
            return name, f"{name}, with which {model} was trained"
    if models and FOR_MODELS in names(script):
        return FOR_MODELS, f"naming a model selects {FOR_MODELS}"
    return "toy", "toy" if models else "toy, as no model is named"


def note(args):
    """Returns a line for the first lines of a run: which recipe was taken unless it was named.

    Also which models were trained without LoRA by an earlier step, where it is on now.
    """
    ends = "learning_rate", "lora_dim", "num_train_epochs", "missing_eos_penalty"
    flags, why = vars(args).items(), args.declared.why
    shown = [f"{flag} {value}" for flag, value in flags if flag.endswith(ends) and value]
    words = f"  recipe   {why}: {', '.join(shown)}; --preset overrides\n" if why else ""
    for role in ROLES:
        model = getattr(args, f"{role}model_name_or_path", None)
        lora = model and getattr(args, f"{role}lora_dim", 0)
        if lora and records.of_model(model).get("lora_dim") == 0:
            words += f"           {model} was trained without LoRA: --{role}lora_dim 0 goes on so\n"
    return words


# ---- Rows of all ranks ----
def divide_rows(args):
    """Gives each rank fewer rows where all would have more than --rows_of_all_ranks.

    A recipe's learning rates and numbers of steps are those of its batch. A bare `deepspeed sft.py`
    takes all devices: eight with as many rows each as two would make a quarter of the steps.
    """
    count = max(1, ranks.launched() // args.tensor_parallel_size)
    group = getattr(args, "samples_per_prompt", 1)  # a rank takes whole groups
    for flag in ROWS & vars(args).keys():
        if args.rows_of_all_ranks and getattr(args, flag) * count > args.rows_of_all_ranks:
            rows = max(1, args.rows_of_all_ranks // count // group) * group
            setattr(args, flag, min(getattr(args, flag), rows))


def rows_note(args, rows_per_step):
    """Returns words for a run's first lines: how many responses a row gets, if several.

    And whether a step has fewer rows than --rows_of_all_ranks. So it is on one rank, and where the
    ranks do not divide the rows.
    """
    samples = getattr(args, "samples_per_prompt", 1)
    most = (args.rows_of_all_ranks or 0) // samples
    words = f", {samples} responses to each" if samples > 1 else ""
    if rows_per_step < most:
        words += f" (the recipe's full batch is {most}: docs/runs.md)"
    return words
