"""Draws metrics.jsonl as curves.png: metrics that belong together share a panel."""

import pandas

# of each group: title, with the unit after a comma | metrics (with the eval_... of each)
PANELS = {
    "learning": """
reward and gold | reward gold
pass@k, share of the prompts | pass_at_1 pass_at_2 pass_at_4 pass_at_8 pass_at_16
best reward of k | best_of_1 best_of_2 best_of_4 best_of_8 best_of_16
accuracy, share of the pairs | accuracy
scores of chosen and rejected | chosen_score rejected_score margin
loss | loss actor_loss critic_loss
perplexity, exp of the loss | perplexity
""",
    "stability": """
KL to the reference, nats a response | kl kl_k3
entropy, nats a token | entropy
length, tokens a response | response_length
ended by EOS, share | eos_rate
critic: explained variance, share | explained_variance
norm of the gradients | grad_norm critic_grad_norm
KL to the policy before, nats a token | approx_kl
largest ratio | ratio_max
clipped, share of the tokens | clip_fraction clip_fraction_low clip_fraction_high
sampling against scoring, nats a token | sampling_gap sampling_kl
prompts that teach nothing, share | equal_groups
deviation of the rewards | reward_std group_std
deviation of the advantages | advantage_std
KL penalty, score a nat | kl_coef
learning rate | learning_rate critic_learning_rate
""",
    "cost": """
tokens/s, all devices | tokens_per_second
TFLOP/s, a device | tflops
parts of a step, seconds | generate_seconds score_seconds train_seconds
""",
}
LEFT_OUT = ["epoch", "seconds", "eval_score_mean", "eval_score_std"]
COLUMNS = 4


def draw(folder, title, limits):
    """Draws metrics.jsonl of `folder`. limits: {metric: the best possible}, as dashed lines."""
    from matplotlib.figure import Figure  # here, so that a run does not wait for it at its start

    lines = pandas.read_json(folder / "metrics.jsonl", lines=True).set_index("step")
    metrics = lines.select_dtypes("number").drop(columns=LEFT_OUT, errors="ignore")
    metrics = metrics.dropna(axis="columns", how="all")
    changing = [name for name in metrics if not is_noise(name, metrics[name])]
    groups = panels_of(metrics[changing or list(metrics)])
    panels = sum(groups.values(), [])
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(16, height := 3 * rows + 0.5))
    # Fixed places: a layout by what the texts need takes as long as drawing, at each evaluation
    figure.subplots_adjust(0.04, 0.5 / height, 0.99, 1 - 0.8 / height, 0.2, 0.45)
    figure.suptitle(title)
    for number, panel in enumerate(panels, 1):
        draw_panel(figure.add_subplot(rows, COLUMNS, number), *panel, limits)
    figure.savefig(folder / "curves.png", dpi=80)


def is_noise(name, values):
    """Returns whether a metric is constant but for rounding."""
    size = values.abs().max()
    least = size if "learning_rate" in name else max(size, 1)
    return values.max() - values.min() <= 1e-6 * least


def panels_of(metrics):
    """Returns {group: [(title, table of metrics)]}; none is empty."""
    rows = [(group, row) for group, rows in PANELS.items() for row in rows.strip().split("\n")]
    panels = [(group, *row.split(" | ")) for group, row in rows]
    named = {name for panel in panels for name in panel[-1].split()}
    for name in metrics:
        if (own := name.removeprefix("eval_")) not in named:
            named.add(own)
            panels.append(("others", own, own))
    groups = {}
    for group, title, names in panels:
        both = [kind + name for name in names.split() for kind in ("", "eval_")]
        if shown := [name for name in both if name in metrics]:
            groups.setdefault(group, []).append((title, metrics[shown]))
    return groups


def draw_panel(axis, title, metrics, limits):
    """Draws a table of metrics; a held-out one with dots, in the colour of the one before it."""
    own = list(dict.fromkeys(name.removeprefix("eval_") for name in metrics))
    for name in metrics:
        values, number = metrics[name].dropna(), own.index(name.removeprefix("eval_"))
        style = "o--" if name.startswith("eval_") or len(values) == 1 else "-"
        axis.plot(values, style, color=f"C{number}", label=name)
    for limit in {limits[name] for name in metrics if name in limits}:  # one of two metrics once
        axis.axhline(limit, linestyle=":", color="gray", label=f"limit {limit:g}")
    axis.set(title=title, xlabel="step")
    axis.legend(loc="upper left", fontsize="x-small", framealpha=0.4)  # "best" is slow
