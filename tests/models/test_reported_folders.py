"""Models and adapters that people reported to other projects. Each docstring names the threads."""

import contextlib
import copy
import json
import types

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from machinery import folders, ppo_flags, saving, zero3
from tests import kit
from tests.tiny_models import (
    CLOSE,
    TOKENIZER,
    config_of,
    folder_of,
    get_args,
    logprobs,
    value_model_of,
    values,
)

WIDE = dict(vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=64)
WIDE |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def edit(file, **changes):
    """Changes keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def save_again(folder, to, stage):
    """Loads a language model at a ZeRO stage and saves it as a run does."""
    model = kit.load_model(folder, get_args(), stage)
    saving.save_model(model, TOKENIZER, to)


def logits_of(folder, stage, dtype="fp32"):
    """Loads a language model at a ZeRO stage. Returns the logits of a few tokens."""
    model = kit.load_model(folder, get_args("--dtype", dtype), stage)
    with torch.no_grad(), zero3.gathered_parameters([*model.parameters()]):
        return model(IDS).logits


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "opt"])
def test_each_stage_takes_the_files_output_matrix(kind, own, tmp_path):
    """The config ties the output matrix to the embedding, the file has one of its own: stock
    transformers uses it. ZeRO-3 took two weights that it had partitioned for equal, and dropped it.
    What is saved says that it is not tied, as vLLM drops it, too. transformers#42612, vllm#51665,
    LlamaFactory#6749, peft#2777"""
    folder = folder_of(tmp_path / "base", config_of(kind, tie_word_embeddings=not own), True)
    edit(tmp_path / "base/config.json", tie_word_embeddings=True)
    kit.on_ranks(save_again, 2, folder, tmp_path / "3", 3)
    save_again(folder, tmp_path / "0", 0)
    stock = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for stage in "03":
        found = load_file(tmp_path / stage / "model.safetensors")
        assert found.keys() == {name for name in stock if own or name != "lm_head.weight"}
        assert all(found[name].equal(stock[name]) for name in found)
        config = folders.load_config(str(tmp_path / stage))
        assert config.tie_word_embeddings == (not own)


def of_gemma():
    """Returns a model with a tower for images: its file's names are not those of its modules."""
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    vision |= dict(image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=WIDE, vision_config=vision)
    return transformers.Gemma3ForConditionalGeneration(config)


def of_qwen(kind):
    """Returns a model whose file's names have a part that its modules lack, unless it is text's."""
    heads = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8)
    heads |= dict(linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])
    config = transformers.Qwen3_5TextConfig(**WIDE, **heads)
    if kind is transformers.Qwen3_5ForConditionalGeneration:
        vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=4)
        vision |= dict(out_hidden_size=32, patch_size=14)
        config = transformers.Qwen3_5Config(text_config=config.to_dict(), vision_config=vision)
    return kind(config)


@pytest.mark.parametrize(
    "make",
    [
        of_gemma,
        lambda: of_qwen(transformers.Qwen3_5ForConditionalGeneration),
        lambda: of_qwen(transformers.Qwen3_5ForCausalLM),
    ],
)
def test_weights_are_saved_under_the_names_that_they_had(make, tmp_path):
    """At stage 3 transformers reverses renamings that it never made. vllm#19139,
    transformers#45313"""
    make().save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    kit.on_ranks(save_again, 2, str(tmp_path / "base"), tmp_path / "3", 3)
    save_again(str(tmp_path / "base"), tmp_path / "0", 0)
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "stock")
    zero, three, stock = (
        load_file(tmp_path / name / "model.safetensors") for name in ("0", "3", "stock")
    )
    assert zero.keys() == three.keys() == stock.keys()
    assert all(three[name].equal(stock[name]) for name in stock)


# --------------------------------------------------------------------------------------------------
# Adapters
# --------------------------------------------------------------------------------------------------
LORA = dict(r=4, init_lora_weights=False)
TABLES = ["embed_tokens", "lm_head"]
LOADED = {
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=["v_proj"]),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["up_proj"]),
    "HRA": lambda: peft.HRAConfig(target_modules=["up_proj"]),
    "DoRA": lambda: peft.LoraConfig(**LORA, use_dora=True, target_modules=["o_proj"]),
    "lm_head": lambda: peft.LoraConfig(**LORA, target_modules=["lm_head"]),
    "both tables": lambda: peft.LoraConfig(**LORA, target_modules=TABLES),
    "a whole table": lambda: peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"]),
    "some tokens": lambda: peft.TrainableTokensConfig(token_indices=[5, 7]),
}
AT_STAGE_3 = [*LOADED][:-1]


def adapted(base, config, folder):
    """Makes a folder of adapters whose every weight says something. Returns stock peft's logits."""
    torch.manual_seed(0)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
            weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    with torch.no_grad():
        return model.eval()(IDS).logits


def logits_at_stage_3(folders):
    return [logits_of(folder, 3) for folder in folders]


@pytest.mark.parametrize("tied", [True, False])
def test_whatever_peft_can_merge_is_added_to_the_weights(tied, tmp_path):
    """What is no LoRA matrix was dropped, and the base trained. peft writes the matrix below an
    adapter of lm_head into the file, too; what is merged into one of two tied matrices must leave
    the other alone. TRL#3031, TRL#1036, peft#1396, peft#2777"""
    base = folder_of(tmp_path / "base", config_of("llama", tie_word_embeddings=tied), True)
    stock = {name: adapted(base, LOADED[name](), tmp_path / name) for name in LOADED}
    ours = {name: logits_of(str(tmp_path / name), 0) for name in LOADED}
    sharded = kit.on_ranks(logits_at_stage_3, 2, [str(tmp_path / name) for name in AT_STAGE_3])[0]
    plain = logits_of(base, 0)
    for name in LOADED:
        assert (stock[name] - plain).abs().max() > 1
        torch.testing.assert_close(ours[name], stock[name], **CLOSE)
    for name, found in zip(AT_STAGE_3, sharded):
        torch.testing.assert_close(found, stock[name], **CLOSE)
    in_bf16 = logits_of(str(tmp_path / "DoRA"), 0, "bf16").float()
    assert (in_bf16 - stock["DoRA"]).abs().mean() < 0.1


@pytest.mark.parametrize("lora_dim", [0, 4])
def test_what_an_adapter_has_untied_is_saved_untied(lora_dim, tmp_path):
    """The base ties its two matrices, an adapter changes one: a whole model says that they are not
    tied. New adapters on top leave the base's config as it is. peft#2777"""
    base = folder_of(tmp_path / "base", config_of("qwen2", tie_word_embeddings=True), True)
    stock = adapted(base, LOADED["lm_head"](), tmp_path / "adapter")
    args = get_args("--model_name_or_path", str(tmp_path / "adapter"))
    model = kit.load_model(str(tmp_path / "adapter"), args, 0, lora_dim=lora_dim)
    saving.save_model(model, TOKENIZER, tmp_path / "saved")
    torch.testing.assert_close(logits_of(str(tmp_path / "saved"), 0), stock, **CLOSE)
    assert folders.load_config(str(tmp_path / "saved")).tie_word_embeddings == bool(lora_dim)
    if not lora_dim:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(again(IDS).logits, stock, **CLOSE)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "LORA", "merged wrongly", "wrongly, in bf16"])
def test_what_peft_cannot_merge_is_refused(kind, tmp_path, monkeypatch):
    """Virtual tokens are no weights of the model; a bias beside LoRA's matrices has no place where
    the layer has none. Both were tracebacks. TRL#3031. Adapters that change the outputs by a
    quarter are found in bf16, too, if they are not merged."""
    config = peft.LoraConfig(**LORA, target_modules=["q_proj"], lora_bias=kind == "LORA")
    if kind == "PROMPT_TUNING":
        config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    if "wrongly" in kind:
        config.lora_alpha = 1
        monkeypatch.setattr(peft.tuners.lora.Linear, "merge", lambda layer: None)
    base = folder_of(tmp_path / "base", config_of("llama"), True)
    adapted(base, config, tmp_path / "adapter")
    with kit.refuses("adapter-kind") as caught:
        logits_of(str(tmp_path / "adapter"), 0, "bf16" if "bf16" in kind else "fp32")
    assert kind in str(caught.value) or "other outputs" in str(caught.value)


# --------------------------------------------------------------------------------------------------
# Judges
# --------------------------------------------------------------------------------------------------
def judge_of(path, labels, whole):
    """Makes a classifier, whole or as peft saves LoRA and a head. Returns its logits, (1, labels).

    Its score is read at the last of IDS.
    """
    base = folder_of(path / "base", config_of("mistral"), True)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    if not whole:
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA, task_type="SEQ_CLS"))
    model.save_pretrained(path / "judge")
    TOKENIZER.save_pretrained(path / "judge")
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("whole", [True, False])
def test_a_judge_made_by_peft_scores(whole, tmp_path):
    """peft keeps a reward model as LoRA and a head, over a base that writes. TRL#578, peft#577,
    LlamaFactory#8988"""
    stock, judge = judge_of(tmp_path, 1, whole), str(tmp_path / "judge")
    folders.refuse_other_kind(judge, folders.load_config(judge), scores=True)
    with kit.refuses("cannot-write"):
        folders.refuse_other_kind(judge, folders.load_config(judge), scores=False)
    model = value_model_of(judge, head="a_name")
    found = values(model, IDS, torch.ones_like(IDS))[:, -1:]
    torch.testing.assert_close(found, stock, **CLOSE)


@pytest.mark.parametrize("whole", [True, False])
def test_a_judge_gives_one_number(whole, tmp_path):
    """One with two labels was refused in words about an option that no script has. TRL#578"""
    judge_of(tmp_path, 2, whole)
    with kit.refuses("unreadable-weights") as caught:
        value_model_of(str(tmp_path / "judge"))
    assert "ignore_mismatched_sizes" not in str(caught.value) and "32]" in str(caught.value)


OF_ACTOR = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
SAME = OF_ACTOR.replace("m.", "message.").replace("for m ", "for message ")


@pytest.mark.parametrize(
    "template, in_chats, fits",
    [
        (OF_ACTOR.replace(": ", " says "), True, False),
        (OF_ACTOR + "{% if add_generation_prompt %}assistant: {% endif %}", True, False),
        (OF_ACTOR.replace(": ", " says "), False, True),  # the prompts are text
        (SAME, True, True),
        (None, True, True),  # nobody knows in what it was trained
    ],
)
def test_a_judge_reads_chats_as_it_was_trained(template, in_chats, fits, tmp_path, capsys):
    """The actor's template writes what the judge reads. In another one a judge of the same
    vocabulary scores what it has never seen, and nobody is told. Of one without a template nobody
    can tell. TRL#6952, TRL#1674, ms-swift#8475"""
    actor, judge = copy.deepcopy(TOKENIZER), copy.deepcopy(TOKENIZER)
    actor.chat_template, judge.chat_template = OF_ACTOR, template
    judge_of(tmp_path, 1, True)
    judge.save_pretrained(tmp_path / "judge")
    args = types.SimpleNamespace(
        actor_model_name_or_path=str(tmp_path / "base"),
        reward_model_name_or_path=[str(tmp_path / "judge")],
        has_critic=False,
        trust_remote_code=False,
        max_seq_len=8,
    )
    with contextlib.nullcontext() if fits else kit.refuses("other-template"):
        ppo_flags.check_models(args, actor, in_chats)
    assert ("has no chat template" in capsys.readouterr().out) == (in_chats and not template)


# --------------------------------------------------------------------------------------------------
# Configs
# --------------------------------------------------------------------------------------------------
SMALL = dict(vocab_size=len(TOKENIZER), d_model=32, encoder_layers=1, decoder_layers=1)
SMALL |= dict(encoder_attention_heads=4, decoder_attention_heads=4)
T5 = dict(vocab_size=len(TOKENIZER), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    "kind, head",
    [
        (transformers.MT5Config(**T5), None),
        (transformers.MT5Config(**T5), "score"),
        (transformers.BartConfig(**SMALL), "score"),  # its decoder alone would write
        (transformers.GraniteMoeConfig(**WIDE), "score"),
    ],
)
def test_a_model_without_a_class_for_the_step_is_refused(kind, head, weights, tmp_path):
    """Without weights it ended in a traceback; with them, in the names of all classes there are.
    trlx#68, TRL#90, DeepSpeedExamples#265, #340"""
    made = transformers.AutoModel.from_config(kind) if weights else kind
    made.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with kit.refuses("no-class") as caught:
        kit.load_model(str(tmp_path), get_args(), 0, None, TOKENIZER, head)
    assert kind.model_type in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("head", [None, "score"])
@pytest.mark.parametrize(
    "key, value",
    [("output_attentions", True), ("return_dict", False), ("output_hidden_states", True)],
)
def test_what_forwards_return_is_not_left_to_the_config(key, value, head, tmp_path):
    """A model that is to return its attention trained to the end, and could not be saved then; one
    that returns a tuple ended in a traceback."""
    folder = folder_of(tmp_path / "base", config_of("opt"), True)
    edit(tmp_path / "base/config.json", **{key: value})
    model = kit.load_model(folder, get_args(), 0, None, TOKENIZER, head)
    if head:
        assert values(model, IDS, torch.ones_like(IDS)).isfinite().all()
    else:
        assert logprobs(model, IDS, torch.ones_like(IDS), 2).isfinite().all()
    saving.save_model(model, TOKENIZER, tmp_path / "saved")
    assert saving.is_whole(tmp_path / "saved")
