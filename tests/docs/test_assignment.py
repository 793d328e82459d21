"""The assignment: the scripts' own functions get all points, and a planted mistake loses some, with
a hint that names what is to be seen of it."""

import ast
import inspect
import re
import sys

import pytest

import common  # noqa: F401
import ppo
import reward  # noqa: F401
import sft  # noqa: F401
from course.assignment import grade, make, run
from course.assignment.checks import CHECKS
from tests import kit

STUDENTS = "ada", "émile"
# A function, and below it: what stands in the script => the mistake => words of a hint
MISTAKES = """
sft_loss_sum
).sum() => ).mean() => two copies
-(logprobs => (logprobs => on paper
logprobs * loss_mask => logprobs => where the mask is 0
(logprobs * loss_mask) => (logprobs.detach() * loss_mask) => no gradient
pair_loss_sum
chosen - rejected => rejected - chosen => wrong order by 8
.sum() => .mean() => on paper
(loss * row_weight) => loss => filler
(chosen + rejected) ** => (chosen - rejected) ** => center_coef
-F.logsigmoid(chosen - rejected) => -(chosen - rejected).sigmoid().log() => of -200
token_logprobs
[wanted] + 1] => [wanted]] => sure of
return scatter => return -1.0 * ~wanted + scatter => elsewhere not 0
tokens, temperature) => tokens) => temperature
TokenLogprobs.apply(logits, tokens, temperature) => \
(logits / temperature).log_softmax(-1)[range(len(tokens)), tokens] => bf16
TokenLogprobs.apply(logits, tokens, temperature) => \
(logits.float() / temperature).softmax(-1)[range(len(tokens)), tokens].log() => hundreds
TokenLogprobs.apply(logits, => TokenLogprobs.apply(logits.detach(), => no gradient
sample
args.temperature), -1) => 1.0), -1) => temperature
probs[:, known] => probs => beyond the tokenizer's
 * cumulative[:, -1:] =>  => top_k
right=True => right=False => probability 0
uniforms[active, r, None] => uniforms[active, 0, None] => other tokens
probs.gather( => cumulative.float().gather( => log-prob
probs.gather( => (allowed / allowed.sum(-1, True)).gather( => beyond the tokenizer's
kl_estimate
ref_logprobs - logprobs => logprobs - ref_logprobs => k1
log_r**2 / 2 => log_r**2 => k2
torch.expm1(log_r) - log_r => torch.expm1(log_r) + log_r => k3
torch.expm1(log_r) - log_r => (torch.expm1(log_r) - log_r).mean() => shape ()
token_rewards
- kl_coef => + kl_coef => on paper
) * mask => ) => padding
kl_coef * kl => kl => kl_coef
kl_coef * kl) => kl_coef * kl.sum(-1, keepdim=True)) => wrong sum
gae
next_value - values[:, t] => next_value + values[:, t] => on paper
gamma * lam * next => gamma * next => lam 0
+ gamma * next_value => + next_value => gamma 0.5
advantage.where(is_step, next_advantage) => advantage => in the padding
(advantages + values) => (advantages + rewards) => the returns
(advantages + values).where(mask > 0, 0) => advantages + values => padding has
next_advantage = next_value = torch.zeros_like(values[:, 0]) => \
next_advantage = next_value = values[:, -1] => follows the last token
advantage.where(is_step, next_advantage) => advantage.where(is_step, 0) => between two turns
whitened
(x - mean) => x => on paper
moments(advantages, masks) => moments(advantages, [m + 1 for m in masks]) => the padding
/ scale * mask => / scale => padding is not 0
moments(advantages, masks) => moments(advantages[:1], masks[:1]) => two micro-batches
**0.5 + 1e-8 => **0.5 => equal advantages
policy_loss
-torch.min => torch.min => on paper
torch.min => torch.max => pushed further
logprobs - old_logprobs => old_logprobs - logprobs => the ratio
clip if clip_high is None else clip_high => clip => clip_high
clamp(1 - clip, high) => clamp(max=high) => far rarer
clamp(1 - clip, high) => clamp(min=1 - clip) => far likelier
torch.min(gain, clipped_gain) => clipped_gain => gets off lightly
(logprobs - old => (logprobs.detach() - old => no gradient
value_loss
torch.max => torch.min => moved away
0.5 *  =>  => on paper
old_values + (values - old_values) => values => pulled further
grpo
(size - 1) => size => on paper
+ 1e-4 =>  => equal rewards
sqrt() + 1e-4) => add(1e-4).sqrt()) => hardly differ
(group_sum(errors**2, groups) / (size - 1)).sqrt() => totals.std() => another prompt's
loss_weights
mask.sum() for mask in masks) => mask.numel() for mask in masks) => tokens:
mask.sum() for mask in masks) => mask.sum() for mask in masks[:1]) => micro-batches
(length > 0).sum() => len(length) => without tokens
args.max_answer_seq_len) => masks[0].shape[1]) => constant
== "constant" => != "tokens" => responses:
"""


def text_of(student, body=make.solution, **changes):
    """Returns the text of a student's file; changes: {function: (text in it, what replaces it)}."""
    text = make.assignment(student, body)
    for name, (old, new) in changes.items():
        own = "\n".join(body(name))
        assert old in own, f"{name} in {make.FUNCTIONS[name]}.py has no {old!r} any more"
        text = text.replace(own, own.replace(old, new))
    return text


def graded(name, student, *change):
    """Returns points and hints of a function, in a file that is right but for the change."""
    functions = {}
    exec(text_of(student, **({name: change} if change else {})), functions)
    results = grade.grade(name, functions[name], student)
    return sum(points for points, hint in results if not hint), [h for _, h in results if h]


def most(name):
    return sum(check.points for check in CHECKS[name])


@pytest.mark.parametrize("name", CHECKS)
def test_the_scripts_own_functions_get_all_points(name):
    """They and the slow sums of expected.py share no line, and agree on any student's numbers."""
    for student in STUDENTS:
        assert graded(name, student) == (most(name), [])


def mistakes():
    """Yields [function, what stands in the script, the mistake, words of a hint]."""
    name = ""
    for line in MISTAKES.splitlines():
        if " => " in line:
            yield [name, *line.split(" => ")]
        else:
            name = line


@pytest.mark.parametrize("name, old, new, words", mistakes())
def test_a_mistake_loses_points_where_it_is(name, old, new, words):
    """Whatever the numbers of the student; and the hint does not quote the line that is right."""
    for student in STUDENTS:
        points, hints = graded(name, student, old, new)
        assert points < most(name)
        assert any(words in hint for hint in hints), hints
        assert not any(old in hint for hint in hints if len(old) > 9)


def test_every_student_has_numbers_of_their_own():
    """So an answer that is copied from another's screen is of no use. They are the same each time,
    and the points are those of the page."""
    wrong = "token_rewards", "- kl_coef", "+ kl_coef"
    (_, [hint, *_]), again, (_, [other, *_]) = (
        graded(wrong[0], student, *wrong[1:]) for student in ("ada", "ada", "bo")
    )
    assert again[1][0] == hint != other
    page = (kit.ROOT / "course/assignment/README.md").read_text()
    said = dict(re.findall(r"\| `(\w+)` \| (\d+)(?= \|)", page))
    assert said == {name: str(most(name)) for name in make.FUNCTIONS}
    assert sum(map(most, CHECKS)) == 100 and f"{grade.LIMIT} seconds" in page


def test_the_blank_file_says_what_the_scripts_say():
    """Signatures and docstrings are those of today; of the bodies nothing is left."""
    text = make.assignment("ada")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    said = {node.name: ast.get_docstring(node) for node in functions}
    for name, module in make.FUNCTIONS.items():
        script = getattr(sys.modules[module], name)
        assert inspect.getdoc(script) == said[name]  # Python 3.13 strips indentation itself
        assert name == "sample" or make.solution(name)[-1] not in make.blank(name)
    assert text.count(make.BLANK) == len(said) == 12 and "searchsorted" not in text


# --------------------------------------------------------------------------------------------------
# Files, as students have them
# --------------------------------------------------------------------------------------------------
@pytest.fixture
def report(tmp_path, capfd, monkeypatch):
    """report(text): what the program prints of a file with it, or of none."""
    monkeypatch.setattr(grade, "LIMIT", 2)

    def print_of(text=None):
        file = tmp_path / "ada.py"
        if text is not None:
            file.write_text(text)
        grade.main([file])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return out

    return print_of


def test_a_file_is_written_and_graded(report, tmp_path, capfd, monkeypatch):
    """Blank, then finished; and a teacher gets a line for each file."""
    out = report()
    assert out.count(grade.BLANK) == 12 and out.endswith("total             0 of 100\n")
    assert (tmp_path / "ada.py").read_text() == make.assignment("ada")
    monkeypatch.setattr(grade, "LIMIT", 60)
    out = report(text_of("ada"))
    assert "total           100 of 100" in out and "make own-demo NAME=ada" in out
    (tmp_path / "bo.py").write_text(make.assignment("bo"))
    (tmp_path / "cy.py").write_text("raise ValueError")
    grade.main([tmp_path / f"{name}.py" for name in ("ada", "bo", "cy")])
    ada, bo, cy = capfd.readouterr().out.splitlines()
    assert ada.split()[:4] == ["ada", "100", "5", "8"] and bo.split()[:2] == ["bo", "0"]
    assert "does not run: ValueError" in cy


@pytest.mark.parametrize(
    "text, words",
    [
        ("def gae(:", "SyntaxError"),
        ("\0", "null bytes"),  # Python 3.11.4 calls it a SyntaxError
        ("raise SystemExit", "SystemExit"),
        ("while True: pass", "does not end"),
        ("import os; os._exit(3)", "ended the program"),
    ],
)
def test_a_file_that_does_not_run_gets_no_points(text, words, report):
    out = report(text)
    assert words in out and out.endswith("0 of 100\n")


BODIES = {  # of functions that go wrong: what is said of each
    "gae": ("while True: pass", "0 of 15  stopped after 2 seconds"),
    "whitened": ("advantages[0].zero_()\n    return advantages", "changes its arguments"),
    "sft_loss_sum": ("return -logprobs * loss_mask", "shape (1, 2)"),
    "pair_loss_sum": ("return None", "NoneType"),
    "kl_estimate": ("return ref_logprobs[99]", "IndexError"),
    "value_loss": ("raise SystemExit", "SystemExit"),
    "token_rewards": ("import os\n    os._exit(0)", "ended the program"),
}


def test_one_function_spoils_no_other(report):
    """Nor one that is missing, or is the script's own."""
    text = text_of("ada")
    for name, (body, _) in BODIES.items():
        lines = [*make.blank(name)[:-1], f"    {body}"]
        text = text.replace("\n".join(make.solution(name)), "\n".join(lines))
    text = text.replace("def policy_loss(", "def another_name(")
    text = text.replace("from ppo import group_sum", "from ppo import group_sum, grpo")
    text = text.replace("def grpo(", "def my_grpo(")
    lines = report(text).splitlines()
    found = {line.split()[0]: i for i, line in enumerate(lines) if " of " in line[:30]}
    said = {name: " ".join(lines[i : i + 2]) for name, i in found.items()}
    expected = {name: words for name, (_, words) in BODIES.items()}
    expected |= dict.fromkeys(["policy_loss", "grpo"], "not defined in the file")
    for name in ("token_logprobs", "sample", "loss_weights"):
        expected[name] = f"{most(name)} of"
    assert not {name: said[name] for name, words in expected.items() if words not in said[name]}
    assert "(line " in said["kl_estimate"] and said["total"].startswith(
        "total            28 of 100"
    )


# --------------------------------------------------------------------------------------------------
# The demo with a student's functions
# --------------------------------------------------------------------------------------------------
def test_a_students_functions_take_the_place_of_the_scripts(monkeypatch):
    """Also where the script keeps a function in a table."""
    for name, module in make.FUNCTIONS.items():  # each is put back afterwards
        monkeypatch.setattr(sys.modules[module], name, getattr(sys.modules[module], name))
    monkeypatch.setitem(ppo.ADVANTAGES, "grpo", ppo.ADVANTAGES["grpo"])
    functions = {}
    exec(text_of("ada"), functions)
    assert run.put(functions) == [*make.FUNCTIONS]
    for name, module in make.FUNCTIONS.items():
        assert getattr(sys.modules[module], name) is functions[name]
    assert ppo.ADVANTAGES["grpo"].of_groups is functions["grpo"]
