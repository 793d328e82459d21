"""The presets are the recipes that they are said to be, and --help teaches every flag."""

import pytest

import common
import ppo
import reward
import sft
from machinery.base.refused import Refused
from machinery.flags import declaring

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}
# DeepSpeed-Chat's training scripts and READMEs, number for number. dropout None: the model's own
FOUR = """Dahoas/rm-static Dahoas/full-hh-rlhf Dahoas/synthetic-instruct-gptj-pairwise
          yitingxie/rlhf-reward-datasets""".split()
SAME = dict(adam_betas=[0.9, 0.95], max_grad_norm=1.0, lr_scheduler_type="cosine", seed=1234)
SAME |= dict(data_split=[2, 4, 4], data_path=FOUR)
OPT = {
    "sft": dict(SAME, model_name_or_path="facebook/opt-1.3b", learning_rate=9.65e-6)
    | dict(weight_decay=0.0, num_train_epochs=16, dropout=None, max_seq_len=512, zero_stage=2)
    | dict(per_device_train_batch_size=8, lora_dim=0),
    "reward": dict(SAME, model_name_or_path="facebook/opt-350m", learning_rate=5e-5)
    | dict(weight_decay=0.1, num_train_epochs=1, dropout=0.0, max_seq_len=512, zero_stage=0)
    | dict(per_device_train_batch_size=4, lora_dim=0),
    "ppo": dict(SAME, data_path=FOUR[:1], actor_learning_rate=9.65e-6, critic_learning_rate=5e-6)
    | dict(actor_weight_decay=0.0, critic_weight_decay=0.0, actor_dropout=0.0, critic_dropout=None)
    | dict(num_train_epochs=1, max_prompt_seq_len=256, max_answer_seq_len=256, ppo_epochs=1)
    | dict(per_device_generation_batch_size=4, per_device_training_batch_size=4)
    | dict(generation_batches=1, actor_zero_stage=2, critic_zero_stage=2, num_warmup_steps=100)
    | dict(kl_coef=0.1, gamma=1.0, lam=0.95, clip=0.2, clip_value=0.2, clip_reward=5.0)
    | dict(enable_ema=1, ema_decay=0.992),
}
# what its llama2/run_llama2_7b.sh have in other numbers
LLAMA = {
    "sft": dict(num_train_epochs=4, per_device_train_batch_size=4, zero_stage=3),
    "reward": dict(learning_rate=9.65e-6, data_path=FOUR[:1], zero_stage=3)
    | dict(per_device_train_batch_size=8),
    "ppo": dict(actor_weight_decay=0.1, critic_weight_decay=0.1, enable_ema=0)
    | dict(actor_zero_stage=3, critic_zero_stage=3)
    | dict(per_device_generation_batch_size=1, per_device_training_batch_size=1),
}
for script in ("sft", "reward"):
    LLAMA[script]["model_name_or_path"] = "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("preset", ["opt-1.3b", "llama-2-7b"])
def test_deepspeed_chats_recipes(script, preset):
    args = SCRIPTS[script].get_args(["--preset", preset])
    recipe = OPT[script] | (LLAMA[script] if preset == "llama-2-7b" else {})
    assert {name: getattr(args, name) for name in recipe} == recipe


def test_eight_gpus_get_the_recipes_batches():
    """docs/runs.md's commands on 8 GPUs: 64 rows in step 1, 32 in steps 2 and 3."""
    for module, rows, stage in ((sft, 64, 2), (reward, 32, 1), (ppo, 32, 2)):
        args = module.get_args(["--preset", "opt-1.3b", "--data_path", "Dahoas/rm-static"])
        name = "training" if module is ppo else "train"
        size = getattr(args, f"per_device_{name}_batch_size")
        config = common.ds_config(args, args.zero_stage, size, args.gradient_accumulation_steps)
        batch = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        assert batch * 8 == rows and config["zero_optimization"]["stage"] == stage


RATES = [("sft", [2e-4]), ("reward", [1e-4]), ("ppo", [3e-5, 3e-5])]


@pytest.mark.parametrize("script, rates", RATES)
def test_naming_a_model_takes_todays_recipe(script, rates):
    """A chat model with LoRA, a few epochs, and the learning rates that were published for it;
    DeepSpeed-Chat's 16 epochs only by name. The toy is for those who name nothing."""
    role = "actor_" if script == "ppo" else ""
    args = SCRIPTS[script].get_args([f"--{role}model_name_or_path", "hub/model"])
    found = [getattr(args, name) for name in sorted(vars(args)) if name.endswith("learning_rate")]
    assert list(filter(None, found)) == rates
    assert args.preset == "qwen2.5-0.5b" == next(iter(SCRIPTS[script].PRESETS))
    assert args.num_train_epochs <= 3 and SCRIPTS[script].get_args([]).preset == "toy"


@pytest.fixture
def parser_of(monkeypatch):
    """Returns a function that gives a script's parser."""

    def parser(script):
        found = []
        with monkeypatch.context() as patch:
            patch.setattr(declaring, "parse", lambda parser, *_: found.append(parser) or 1 / 0)
            with pytest.raises(ZeroDivisionError):
                SCRIPTS[script].get_args([])
        return found[0]

    return parser


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches_every_flag(script, parser_of):
    """Its header, and a line for each flag. Two flags of one name would share a value, and a preset
    that names none would do nothing."""
    parser, module = parser_of(script), SCRIPTS[script]
    assert module.__doc__.strip().splitlines()[0] in parser.format_help()
    flags = {action.dest: action for action in parser._actions if action.dest != "help"}
    assert all(len(action.help.split()) > 2 for action in flags.values())
    assert len(flags) == len(parser._actions) - 1
    assert all(set(preset) <= set(flags) for preset in module.PRESETS.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_number_outside_its_range_is_refused(script, parser_of):
    """By the name of its flag. Each has a range where it is declared, 0 or more unless said
    otherwise."""
    numeric = [flag for flag in parser_of(script)._actions if flag.type in (int, float)]
    assert len(numeric) > 20
    for flag in numeric:
        outside = [flag.least - 1] + [flag.most + 1] * (flag.most < declaring.FINITE)
        for number in outside + ["nan"] * (flag.type is float):
            with pytest.raises((Refused, SystemExit)):
                SCRIPTS[script].get_args([f"--{flag.dest}={number}"])
