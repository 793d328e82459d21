"""The held-out pairs that a reward model of the toy gets most wrong: see course/class.md.

python course/worst_pairs.py output/class/reward          the five worst, with file and line
python course/worst_pairs.py output/class/reward gold     and who is wrong, by toy/gold.py
"""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "toy"))
from gold import gold  # noqa: E402


def who_is_wrong(prompt, chosen, rejected):
    """Says who is wrong by the rule where the judge prefers the rejected response.

    >>> ask, good = "How does the otter get to the mill?", " The otter gets to the mill by boat."
    >>> who_is_wrong(ask, good, " Go away!" + good)
    'the judge'
    """
    of_chosen, of_rejected = gold([prompt] * 2, [chosen, rejected])
    if of_chosen == of_rejected:
        return "nobody: both are equally good"
    return "the judge" if of_chosen > of_rejected else "the label"


def main(folder, *words):
    pairs = [json.loads(line) for line in open(Path(folder) / "judge.jsonl")]
    wrong = [pair for pair in pairs if pair["chosen_score"] < pair["rejected_score"]]
    wrong.sort(key=lambda pair: pair["chosen_score"] - pair["rejected_score"])
    print(f"{len(wrong)} of {len(pairs)} pairs are in the wrong order. The worst:")
    for pair in wrong[:5]:
        print(f"\n{pair['prompt'].splitlines()[0]}   ({pair['place']})")
        for side in ("chosen", "rejected"):
            print(f"  {side:9}{pair[side + '_score']:6.2f} {pair[side]}")
    if "gold" in words:
        texts = (map(pair.get, ("prompt", "chosen", "rejected")) for pair in wrong)
        counts = Counter(who_is_wrong(*each) for each in texts)
        print("\nWho is wrong, by toy/gold.py:")
        for who, count in counts.most_common():
            print(f"{count:5} {who}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
