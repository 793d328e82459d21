"""In which order rows are trained on: each once an epoch, the same on any number of ranks."""

import itertools
from types import SimpleNamespace

import datasets
import numpy as np
import pytest

from machinery import batching, ranks
from machinery.run import Run

LENGTHS = np.random.default_rng(0).integers(1, 100, 83)  # 83 rows: the last step of 8 is 5 short
by_length = pytest.mark.parametrize("group_by_length", [0, 1])


def steps_of(monkeypatch, group_by_length, epoch=0, seed=1, layout=(1, 8, 1)):
    """Returns, for each optimizer step, the sorted rows of all ranks; asserts that all ranks make
    the same number of forwards. layout: ranks, rows of a micro-batch, micro-batches."""
    count, batch_size, micro_steps = layout
    monkeypatch.setattr(ranks, "get_world_size", lambda: count)
    given = LENGTHS, seed, epoch, batch_size, micro_steps, group_by_length
    per_rank = []
    for rank in range(count):
        monkeypatch.setattr(ranks, "get_rank", lambda: rank)  # noqa: B023
        per_rank.append(np.array(batching.epoch_batches(*given)))  # all batches are of one size
    steps = np.stack(per_rank, 1).reshape(-1, count * batch_size * micro_steps)
    return np.sort(steps).tolist()


@pytest.mark.parametrize(
    "started, count",
    [
        ({}, 1),
        (dict(WORLD_SIZE="2"), 2),
        (dict(SLURM_NTASKS="8", SLURM_STEP_ID="0"), 8),  # srun
        (dict(SLURM_NTASKS="8"), 1),  # plain python, in a shell of Slurm's
    ],
)
def test_a_run_knows_how_many_ranks_were_started(monkeypatch, started, count):
    """Before they have met: --tensor_parallel_size must divide them."""
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert ranks.launched() == count


@by_length
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks(monkeypatch, group_by_length):
    """Eight rows a step, as 1 rank x 8, 2 x 4 or 8 x 1, in one micro-batch or several: the same
    eight rows. Each of the 83 comes once an epoch, in ten whole steps and one of three rows, filled
    up with five fillers (-1)."""
    steps = steps_of(monkeypatch, group_by_length)
    for layout in ((2, 4, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8)):
        assert steps_of(monkeypatch, group_by_length, layout=layout) == steps
    assert sorted(sum(steps, [])) == [-1] * 5 + list(range(83))
    assert sorted(step.count(-1) for step in steps) == [0] * 10 + [5]


@by_length
def test_each_epoch_has_its_own_order_from_the_seed(monkeypatch, group_by_length):
    """A sampler that is never told its epoch gives the same order sixteen times."""
    which = (0, 1), (1, 1), (2, 1), (0, 2), (0, 1)
    orders = [str(steps_of(monkeypatch, group_by_length, *each)) for each in which]
    assert orders[0] == orders[-1] and len({*orders}) == 4


def test_a_run_tells_its_epoch_and_goes_on_in_the_middle_of_one():
    """--num_train_epochs 2 of 9 rows in steps of 2 x 2, the third of an epoch a short one."""
    args = SimpleNamespace(seed=1, group_by_length=0, num_train_epochs=2, max_steps=-1)
    run, train = SimpleNamespace(args=args), datasets.Dataset.from_dict({"length": [1] * 9})
    assert Run.plan(run, None, train, [], 2, 2) == 6

    def drawn(done):
        steps = itertools.islice(Run.draw(run, done, list), 6 - done)
        return [[row["row"] for rows in step for row in rows] for step in steps]

    whole = drawn(0)
    first, second = (sum(steps, []) for steps in (whole[:3], whole[3:]))
    assert first != second and sorted(first) == sorted(second) == [-1, -1, -1, *range(9)]
    assert drawn(4) == whole[4:]
    args.seed = 2
    assert drawn(0) != whole


def test_grouping_by_length_saves_padding(monkeypatch):
    """Rows of like length together: less than a third of the padding of a plain shuffle. And not
    from long to short: an order by length would be a curriculum that nobody asked for."""
    padding = []
    for group_by_length in (0, 1):
        steps = steps_of(monkeypatch, group_by_length)
        real = [[LENGTHS[i] for i in step if i >= 0] for step in steps]
        padding.append(sum(max(step) * len(step) - sum(step) for step in real))
        longest = [max(step) for step in real]
    assert padding[1] < padding[0] / 3
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_a_weight_that_a_row_brings_is_kept():
    """And a filler's is 0, whatever row it repeats."""
    rows = batching.Rows([{"row_weight": 0.5}, {}])
    assert [rows[i]["row_weight"] for i in (0, 1, -1)] == [0.5, 1, 0]
