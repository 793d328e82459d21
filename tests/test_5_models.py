"""Any causal language model will do: what the scripts may rely on, shown on ten
tiny random architectures.

One process, no DeepSpeed engine. What changes when weights are sharded over
ranks is in test_6_deepspeed.py.
"""

import json
import socket
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BloomConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

import common
import ppo
import reward
import sft
from machinery.data import rows
from machinery.flags import ppo_flags
from machinery.models import architecture, model_checks, model_folders, saving
from machinery.rollout import compiled_decoding, decoding, shared_prompts
from tests import workers
from tests.conftest import generate, load_model

SPARE = 8  # rows of the embedding that no token uses, as most models have
TOKENIZER = AutoTokenizer.from_pretrained(workers.TOKENIZER)
VOCAB = len(TOKENIZER) + SPARE
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
OPT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=64,
    init_std=0.2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
CONFIGS = {
    "opt": OPTConfig(**OPT, word_embed_proj_dim=32),
    # the backbone puts out 16, not 32
    "opt-350m": OPTConfig(**OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
    ),
    "gpt-neox": GPTNeoXConfig(**SHAPE),
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "gemma": GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=8),
    "mistral": MistralConfig(**SHAPE, num_key_value_heads=2),
    "bloom": BloomConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    ),
}
every_model = pytest.mark.parametrize("name", CONFIGS)


def folder_of(path, config, tokenizer=TOKENIZER):
    """A folder as the toy's model is one: config.json and a tokenizer, no weights."""
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def get_args(*flags):
    return sft.get_args(["--preset", "toy", "--dtype", "fp32", *flags])


@pytest.fixture
def folder(name, tmp_path):
    return folder_of(tmp_path / "model", CONFIGS[name])


@pytest.fixture
def language_model(folder):
    return load_model(folder, get_args(), stage=0).eval()


@pytest.fixture
def value_model(folder):
    return load_model(folder, get_args(), stage=0, tokenizer=TOKENIZER, value_head="score").eval()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"a socket was opened: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def random_ids(*shape, seed=0):
    return torch.randint(2, len(TOKENIZER), shape, generator=torch.Generator().manual_seed(seed))


# prompts, or texts, of different lengths
RAGGED = [random_ids(n, seed=n).tolist() for n in (9, 4, 1, 6)]


# --------------------------------------------------------------------------------------------------
# What the scripts rely on, tried out on a small copy before any weights are loaded
# --------------------------------------------------------------------------------------------------
# architectures of full size, that is their configs alone, and what their copies do
FULL_SIZE = """llama mistral qwen2 qwen3 qwen3_moe qwen3_next gemma gemma2 gemma3_text gemma4_text
    phi phi3 falcon opt gpt2 gpt_neo gptj gpt_neox gpt_oss bloom mpt olmo2 mixtral deepseek_v3
    glm4 granite cohere stablelm starcoder2 smollm3 jamba nemotron_h lfm2 falcon_h1""".split()
BOTH_WAYS = ["bert", "roberta", "electra", "xlm", "xlnet", "xlm-roberta"]
NO_PADDING = """rwkv recurrent_gemma deepseek_v4 bart marian pegasus blenderbot whisper
    trocr""".split()
NO_CACHE = ["minimax", "openai-gpt", "mamba", "mamba2"]


@every_model
def test_the_models_of_these_tests_pass_the_checks(name):
    """Whatever a config says (a narrow output of OPT-350M, ALiBi, a window), the copy does as well,
    and the right ones pass."""
    small = architecture.small_copy(CONFIGS[name])
    assert not architecture.looks_ahead(small) and not architecture.sees_padding(small)
    assert architecture.decodes(small, decoding.leaving)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_an_architecture_of_full_size_is_tried_out_small(name):
    """Causal, honours padding, decodes as it scores, and some have a thousand times the weights.
    With states of Mamba and the like a static cache gives other log-probs: it is refused there."""
    config = AutoConfig.for_model(name)
    before = config.to_dict()
    state = torch.get_rng_state()
    small = architecture.small_copy(config)
    assert not architecture.looks_ahead(small) and not architecture.sees_padding(small)
    assert architecture.decodes(small, decoding.leaving)
    static = architecture.decodes(small, compiled_decoding.each_slot)
    assert static == (name not in ("qwen3_next", "jamba", "nemotron_h", "falcon_h1"))
    assert sum(parameter.numel() for parameter in small.parameters()) < 5e7
    assert config.to_dict() == before and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", [*BOTH_WAYS, *NO_PADDING, *NO_CACHE, "cpmant"])
def test_architectures_that_would_learn_wrong_things_are_told(name):
    """BERT looks at the answer while it predicts it; Whisper takes padding for text; Mamba has no
    keys to go on from. All of them would train, and the ratio of step 3 would be 1: both of its
    passes would be wrong alike."""
    small = architecture.small_copy(AutoConfig.for_model(name))
    ahead, padding = architecture.looks_ahead(small), architecture.sees_padding(small)
    if name != "cpmant":  # a prefix that looks both ways
        assert (ahead, padding) == (name in BOTH_WAYS, name in NO_PADDING)
    try:
        assert not architecture.decodes(small, decoding.leaving)
    except (ValueError, RuntimeError, AttributeError, IndexError, AssertionError) as error:
        assert not str(error).startswith("assert")


def test_all_kinds_of_layers_are_in_the_copy():
    """In a model whose first five layers are Mamba's, two layers would say nothing of the sixth."""
    kinds = ["mamba"] * 5 + ["attention"] + ["mamba"] * 6
    config = AutoConfig.for_model("granitemoehybrid", layer_types=kinds, num_hidden_layers=12)
    small = architecture.small_copy(config)
    assert len(small.model.layers) == 6 and architecture.decodes(small, decoding.leaving)


def test_code_that_comes_with_a_model_is_tried_out_too(tmp_path, monkeypatch, capsys):
    """A model's own Python is the likeliest to forget the mask: here attention that ignores it. And
    code that fails on this machine is warned of, as it may need a GPU."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = folder_of(tmp_path / "mine", CONFIGS["llama"])
    kinds = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    file = tmp_path / "mine/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": kinds}))
    (tmp_path / "mine/mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MineConfig(LlamaConfig):\n    pass\n"
        "class Mine(LlamaForCausalLM):\n    config_class = MineConfig\n"
        "    def forward(self, input_ids, attention_mask=None, **options):\n"
        "        if input_ids.shape[1] == self.config.num_key_value_heads:\n"
        "            raise RuntimeError('no GPU')\n"
        "        return super().forward(input_ids, **options)\n"
    )
    with pytest.raises(SystemExit):
        model_checks.try_out(folder, True, None)
    assert "does not honour padding on the left" in capsys.readouterr().err
    file.write_text(
        file.read_text().replace('"num_key_value_heads": 2', '"num_key_value_heads": 4')
    )
    model_folders.load.cache_clear()
    assert model_checks.try_out(folder, True, decoding.leaving) == ()
    assert "could not be tried out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, change, error",
    [
        ("llama", dict(hidden_act="nope"), KeyError),
        ("llama", dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=3), RuntimeError),
        ("gpt2", dict(n_head=5), ValueError),
        ("zamba", {}, architecture.CannotTell),  # layers that share weights cannot be cut off
    ],
)
def test_a_config_that_makes_no_model_raises(name, change, error):
    """What the model itself would say, hours of download earlier."""
    with pytest.raises(error):
        architecture.small_copy(AutoConfig.for_model(name, **change))


# --------------------------------------------------------------------------------------------------
# From scratch, and dropout
# --------------------------------------------------------------------------------------------------
@every_model
def test_a_folder_without_weights_starts_from_scratch(name, folder):
    """config.json alone is a model that has learned nothing: random weights,
    and --seed decides which."""
    first, same = (
        load_model(folder, get_args("--seed", "1"), stage=0).state_dict() for _ in range(2)
    )
    other = load_model(folder, get_args("--seed", "2"), stage=0).state_dict()
    matrices = [k for k, v in first.items() if v.dim() == 2 and v.is_floating_point()]
    assert len(matrices) > 8
    assert all(torch.equal(first[k], same[k]) for k in first)
    assert all(first[k].std() > 0 and not torch.equal(first[k], other[k]) for k in matrices)


@every_model
def test_dropout_0_makes_training_and_scoring_the_same_network(name, folder):
    """PPO compares log-probs of a training pass with stored ones: --actor_dropout 0 must silence
    every dropout there is, whatever the architecture calls it; any other number must be heard."""
    ids = random_ids(2, 12)
    for dropout, same in ((0.0, True), (0.5, False)):
        model = load_model(folder, get_args(), 0, dropout)
        with torch.no_grad():
            outputs = [
                common.last_logprobs(
                    model.train(mode), ids, torch.ones_like(ids), torch.ones(len(ids), 8)
                )
                for mode in (True, False)
            ]
        assert torch.equal(*outputs) == same
    left_alone = load_model(folder, get_args(), 0, None).config.to_dict()
    keys = [k for k in left_alone if "drop" in k]
    assert {k: left_alone[k] for k in keys} == {k: CONFIGS[name].to_dict()[k] for k in keys}


# --------------------------------------------------------------------------------------------------
# Padding and generation
# --------------------------------------------------------------------------------------------------
def padded(ids, amount, content):
    """(1, T) -> ids, mask: (1, amount + T), with `amount` junk tokens on the left."""
    junk = torch.full((1, amount), 0) if content == "pad" else random_ids(1, amount, seed=99)
    return torch.cat([junk, ids], 1), torch.cat([torch.zeros_like(junk), torch.ones_like(ids)], 1)


@every_model
@torch.no_grad()
def test_padding_never_changes_a_logprob_or_a_value(name, language_model, value_model):
    """A row is padded to the longest of its batch, which is chance; so neither
    the number of padding slots nor what stands in them may be seen in the
    result. This needs position ids that count real tokens only."""
    ids = random_ids(1, 11)
    plain = torch.ones_like(ids)
    # (1, 7), (1, 11)
    logprobs, values = (
        common.last_logprobs(language_model, ids, plain, torch.ones(1, 7)),
        value_model(ids, plain),
    )
    assert logprobs.std() > 1e-3 and values.std() > 1e-4  # the tokens do differ from each other
    for amount, content in ((1, "pad"), (9, "pad"), (9, "junk")):
        wide, mask = padded(ids, amount, content)
        torch.testing.assert_close(
            common.last_logprobs(language_model, wide, mask, torch.ones(1, 7)),
            logprobs,
            rtol=1e-4,
            atol=2e-5,
        )
        torch.testing.assert_close(
            value_model(wide, mask)[:, amount:], values, rtol=1e-4, atol=2e-5
        )


@every_model
@torch.no_grad()
def test_the_head_multiplies_in_fp32_also_in_a_bf16_model(name, folder):
    """bf16 has 8 bits: multiplied there, values between 4 and 8 move in steps of 1/32, and many
    held-out responses have the same score. Our head's product is that of exact numbers."""
    args = get_args("--dtype", "bf16")
    model = load_model(folder, args, stage=0, tokenizer=TOKENIZER, value_head="score")
    ids, hidden = random_ids(8, 40), []
    model.model.base_model.register_forward_hook(lambda *x: hidden.append(x[-1][0]))
    values = model(ids, torch.ones_like(ids))
    weight = model.model.score.weight
    assert weight.dtype == hidden[0].dtype == torch.bfloat16
    exact = (hidden[0].double() @ weight.double().T).squeeze(-1)
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-6)
    assert len(values.unique()) > 0.95 * values.numel()


@every_model
def test_padding_gets_no_gradient(name, value_model):
    """The score of a padded row is a function of its real tokens alone: the embedding of a
    token that stands only in padding gets gradient 0, the others and the head do not."""
    ids, mask = common.pad([[5, 6, 7, 8], [5, 6]], 0)
    value_model(ids, mask)[:, -1].sum().backward()
    embedding = value_model.model.get_input_embeddings().weight.grad
    assert embedding[0].abs().max() == 0 and embedding[9:].abs().max() == 0
    assert embedding[5:9].abs().amax(1).min() > 0
    assert value_model.model.score.weight.grad.abs().min() > 0


@every_model
def test_a_shared_prompt_changes_no_score_and_no_gradient(name, folder, value_model):
    """Step 2 computes the prompt of a pair once. Scores and gradients are those
    of two rows, on every architecture that takes a mask and positions of its
    own: of these all but BLOOM, whose ALiBi makes its own distances."""
    assert shared_prompts.can_share_prompt(value_model, 64) == (name != "bloom")
    if name == "bloom":
        return
    pairs = [
        {
            "prompt_ids": p,
            "responses": [random_ids(c, seed=c).tolist(), random_ids(r, seed=r).tolist()],
            "row_weight": 1,
        }
        for p, c, r in zip(RAGGED, (3, 7, 2, 1), (5, 1, 2, 8))
    ]
    found = []
    for share in (False, True):
        value_model.zero_grad()
        chosen, rejected = reward.score_pairs(value_model, reward.collate(pairs, 0, share))
        (chosen * 3 - rejected).sum().backward()
        found.append(
            [chosen, rejected, *(p.grad for p in value_model.parameters() if p.grad is not None)]
        )
    assert found[0][0].std() > 1e-4
    for apart, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, apart, rtol=1e-3, atol=2e-5)


def group_rollout(sizes, lengths):
    """Responses of the given lengths, three to each prompt; the last three are fillers'."""
    rows = []
    for size, three in zip(sizes, lengths):
        prompt = random_ids(size, seed=size).tolist()
        texts = [random_ids(length, seed=7 * size + length).tolist() for length in three]
        rows += [{"prompt_ids": prompt, "response_ids": t, "row_weight": 1.0} for t in texts]
    for row in rows[-3:]:
        row["row_weight"] = 0.0
    return [{**row, "ended": 1.0, "row": i // 3} for i, row in enumerate(rows)]


@every_model
@pytest.mark.parametrize("head", [False, True])
def test_a_group_in_one_row_changes_no_logprob_no_value_and_no_gradient(name, folder, head):
    """prompt | y_1 | y_2 | y_3: what every response gets in a row of its own, with ragged lengths,
    a response that is EOS alone, a prompt of one token, fillers, and two responses that are equal
    (to the bit: GRPO would make much of rounding errors); and so do all weights."""
    tokenizer = TOKENIZER if head else None
    value_head = "score" if head else None
    model = load_model(folder, get_args(), 0, tokenizer=tokenizer, value_head=value_head).eval()
    assert shared_prompts.can_share_prompt(model, 64) == (name != "bloom")
    if name == "bloom":
        return
    responses = group_rollout((5, 1, 9, 4), ((3, 1, 6), (2, 2, 4), (1, 5, 1), (2, 3, 1)))
    args, found = SimpleNamespace(temperature=0.7, entropy_coef=0.1), []
    for responses_a_row in (1, 3):
        pad = SimpleNamespace(pad_token_id=0)
        (batch,) = ppo.make_micro_batches(pad, responses, len(responses), responses_a_row)
        assert (batch.shared is None) == (responses_a_row == 1)
        model.zero_grad()
        if head:
            outputs = ppo.critic_forward(args, model, batch, True) * batch.response_mask
            outputs = [outputs, ppo.reward_model_scores(model, batch)]
        else:
            outputs = ppo.actor_forward(args, model, batch, True)
        slopes = torch.linspace(-1, 1, outputs[0].numel()).reshape(outputs[0].shape)
        sum((output * slopes).sum() for output in outputs).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([*outputs, *gradients])
        for output in outputs[:1] if responses_a_row > 1 else ():  # the same words, the same bits
            assert responses[3]["response_ids"] == responses[4]["response_ids"]
            assert output[3].abs().sum() > 0 and torch.equal(output[3], output[4])
    assert found[0][0].std() > 1e-4
    for apart, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, apart, rtol=1e-3, atol=3e-5)


@pytest.mark.parametrize(
    "samples, rows, prompt, response, hidden, expected",
    [
        (4, 4, 256, 64, 1024, 4),
        (4, 6, 256, 64, 1024, 2),  # 4 do not divide a micro-batch of 6
        (1, 4, 256, 64, 1024, 1),
        (8, 8, 16, 512, 64, 1),  # attention to the others' long responses costs more than it saves
        (8, 8, 512, 16, 64, 8),
        (8, 8, 256, 256, 256, 2),  # (256 + 256 n) (1536 + 256 + 256 n) / n: 1,048, 884, 920, ...
    ],
)
def test_as_many_responses_share_a_row_as_pays(
    samples, rows, prompt, response, hidden, expected, monkeypatch
):
    """Worked by hand: T (6 H + T) / n for a row of T tokens with n responses."""
    monkeypatch.setattr(shared_prompts, "permitted", lambda args, *models: True)
    monkeypatch.setattr(shared_prompts, "picks_positions", lambda model: True)
    args = SimpleNamespace(samples_per_prompt=samples, per_device_training_batch_size=rows)
    args.max_prompt_seq_len, args.max_answer_seq_len = prompt, response
    text_config = SimpleNamespace(hidden_size=hidden)
    config = SimpleNamespace(get_text_config=lambda: text_config)
    model = SimpleNamespace(config=config)
    assert shared_prompts.responses_a_row(args, model, model) == expected


def test_responses_that_share_a_row_stay_together():
    """Whether they are sorted by length or shuffled, and whatever their own lengths are."""
    responses = group_rollout((5, 1, 9, 4), ((3, 1, 6), (2, 2, 4), (1, 5, 1), (2, 3, 1)))
    for updates in (1, 2):
        sizes = SimpleNamespace(updates_a_pass=updates)
        laid_out = ppo_flags.Sizes.arranged(sizes, list(responses), (1, 2), responses_a_row=3)
        rows = [response["row"] for response in laid_out]
        assert rows[0::3] == rows[1::3] == rows[2::3] and sorted(rows[::3]) == [0, 1, 2, 3]
        assert laid_out[:3] != responses[:3] or updates == 2
        if updates == 1:
            assert rows[::3] == [1, 3, 0, 2]


@pytest.mark.parametrize(
    "change, shares",
    [
        (dict(sliding_window=63), False),
        (dict(sliding_window=64), True),
        (dict(attn_implementation="eager"), False),
        (dict(is_causal=False), False),
    ],
)
def test_a_short_window_or_another_attention_does_not_share_the_prompt(change, shares):
    """A window shorter than a row is the model's own mask, eager attention adds
    masks up instead of choosing, and some look both ways."""
    config = MistralConfig(**{**SHAPE, "sliding_window": None, **change}, num_key_value_heads=2)
    model = common.ValueModel(AutoModelForSequenceClassification.from_config(config), "score")
    assert shared_prompts.can_share_prompt(model, 64) == shares


@every_model
def test_logprobs_are_log_softmax_of_the_plain_model(name, language_model):
    """logits[:, t] score token t+1, here checked token by token against the
    textbook formula on an unpadded row; with a temperature the scored
    distribution is softmax(logits / temperature), the one that is sampled."""
    ids = random_ids(1, 10)
    with torch.no_grad():
        logits = language_model(ids).logits  # (1, 10, V)
        for temperature in (1.0, 0.7):
            expected = [
                torch.log_softmax(logits[0, t - 1] / temperature, -1)[ids[0, t]].item()
                for t in range(6, 10)
            ]
            ours = common.last_logprobs(
                language_model, ids, torch.ones_like(ids), torch.ones(len(ids), 4), temperature
            )
            assert ours[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@every_model
def test_greedy_generation_equals_stock_transformers(name, language_model):
    """What is generated is what the plain model would generate: with top_k 1
    sampling is greedy, and must give the tokens of transformers' own generate()
    on a ragged, left-padded batch, up to and including the first EOS."""
    ids, mask = common.pad(RAGGED, 0)
    options = dict(
        attention_mask=mask, do_sample=False, max_new_tokens=10, min_new_tokens=None, pad_token_id=0
    )
    uniforms = decoding.row_uniforms(1, 0, range(4), 10)
    free = language_model.generate(ids, **options, eos_token_id=None)[:, ids.shape[1] :]
    eos = free[0, 4].item()  # some token that the model does come up with, in the role of EOS
    if eos == 0:
        eos = free[1, 4].item()
    stock = language_model.generate(ids, **options, eos_token_id=eos)[:, ids.shape[1] :]  # (4, R')
    ours, ours_mask = generate(
        language_model,
        ids,
        mask,
        uniforms,
        SimpleNamespace(pad_token_id=0, eos_token_id=eos),
        top_k=1,
    )
    lengths = ours_mask.sum(1).tolist()
    assert min(lengths) < 10
    for row, length in enumerate(lengths):
        assert ours[row, :length].tolist() == stock[row, :length].tolist()
        assert (ours[row, length - 1] == eos) == (length < 10 or eos == stock[row, -1].item())
        assert stock[row, length:].eq(0).all() and ours[row, length:].eq(0).all()


def test_an_answer_depends_on_its_own_row_only(tmp_path):
    """Sampling takes each row's own uniforms: alone, in a batch, or in another slot of it,
    a prompt gets the same answer. So a rollout does not change with the number of GPUs."""
    model = load_model(folder_of(tmp_path, CONFIGS["llama"]), get_args(), stage=0).eval()
    ids, mask = common.pad(RAGGED, 0)
    uniforms = decoding.row_uniforms(1, 0, range(4), 8)
    together, _ = generate(model, ids, mask, uniforms, TOKENIZER, temperature=0.9)
    order = [2, 0, 3, 1]
    shuffled, _ = generate(
        model, ids[order], mask[order], uniforms[order], TOKENIZER, temperature=0.9
    )
    assert shuffled.tolist() == together[order].tolist()
    for row, prompt in enumerate(RAGGED):
        alone, _ = generate(
            model, *common.pad([prompt], 0), uniforms[row : row + 1], TOKENIZER, temperature=0.9
        )
        assert alone[0].tolist() == together[row, : alone.shape[1]].tolist()
    assert len({tuple(row) for row in together.tolist()}) == 4


@torch.no_grad()
def test_sampled_frequencies_are_the_models_probabilities(tmp_path):
    """The inverse of the cumulative distribution at evenly spread uniforms hits
    each token as often as its probability says; top_k and top_p cut the tail,
    and what is left keeps its proportions."""
    model = load_model(folder_of(tmp_path, CONFIGS["llama"]), get_args(), stage=0).eval()
    count = 2000
    ids = torch.tensor([RAGGED[1]]).expand(count, -1)
    uniforms = ((torch.arange(count) + 0.5) / count)[:, None]  # (count, 1): one token each
    probs = torch.softmax(model(ids[:1]).logits[0, -1], -1)
    for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.5)):
        ordered, index = probs.sort(descending=True)
        kept = top_k or (int((ordered.cumsum(0) < top_p).sum()) + 1 if top_p < 1 else VOCAB)
        expected = torch.zeros(VOCAB).index_put(
            (index[:kept],), ordered[:kept] / ordered[:kept].sum()
        )
        tokens, _ = generate(
            model, ids, torch.ones_like(ids), uniforms, TOKENIZER, top_k=top_k, top_p=top_p
        )
        seen = torch.bincount(tokens[:, 0], minlength=VOCAB) / count
        assert (seen - expected).abs().max() <= 1.01 / count


# --------------------------------------------------------------------------------------------------
# Saved here, loaded in stock transformers, and the other way round
# --------------------------------------------------------------------------------------------------
@every_model
@torch.no_grad()
def test_a_saved_model_loads_in_stock_transformers(
    name, folder, language_model, tmp_path, no_network
):
    """What a step leaves behind is an ordinary model folder: stock transformers loads it,
    offline, with the same logits to the bit, and the tokenizer lies beside the weights."""
    tokenizer = model_folders.load_tokenizer(folder)
    saving.save_model(language_model, tokenizer, tmp_path / "saved")
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = random_ids(2, 9)
    assert torch.equal(stock.eval()(ids).logits, language_model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == tokenizer.get_vocab()
    assert not list((tmp_path / "saved").glob(".*")), "nothing half-written is left"


def stock_scores(model, ids, mask, name):
    """Score of each row by stock transformers. Its GPT-2 counts positions from
    slot 0, padding included, unless told."""
    more = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if name == "gpt2" else {}
    return model(ids, attention_mask=mask, **more).logits[:, 0]  # (B,)


@every_model
@torch.no_grad()
def test_stock_transformers_gives_a_saved_value_model_the_same_scores(
    name, value_model, tmp_path, no_network
):
    """The reward model is AutoModelForSequenceClassification with one label, to
    anyone else: the same number per text, read at the last token that is not
    padding, whichever side the padding is on."""
    saving.save_model(value_model, TOKENIZER, tmp_path / "saved")
    stock, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and stock.config.num_labels == 1
    stock.eval()
    left_ids, left_mask = common.pad(RAGGED, 0)
    right_ids, right_mask = (
        torch.stack([row.roll(int(m.sum()) - len(m)) for row, m in zip(x, left_mask)])
        for x in (left_ids, left_mask)
    )
    ours_left = value_model(left_ids, left_mask)[:, -1]
    ours_right = value_model(right_ids, right_mask).gather(1, right_mask.sum(1, keepdim=True) - 1)[
        :, 0
    ]
    assert ours_left.std() > 1e-4
    close = dict(rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(ours_right, ours_left, **close)
    torch.testing.assert_close(stock_scores(stock, left_ids, left_mask, name), ours_left, **close)
    torch.testing.assert_close(
        stock_scores(stock, right_ids, right_mask, name), ours_right, **close
    )


@every_model
@torch.no_grad()
def test_a_reward_model_made_elsewhere_keeps_its_head(name, tmp_path):
    """A head is initialised only when it is new: a sequence-classification checkpoint of
    stock transformers comes in with every weight, head included, untouched to the bit."""
    config = CONFIGS[name].__class__.from_dict(
        {**CONFIGS[name].to_dict(), "num_labels": 1, "pad_token_id": 0}
    )
    stock = AutoModelForSequenceClassification.from_config(config).eval()
    stock.score.weight.fill_(0.25)
    folder = folder_of(tmp_path / "made_elsewhere", config)
    stock.save_pretrained(folder)
    ours = load_model(folder, get_args(), stage=0, tokenizer=TOKENIZER, value_head="score").eval()
    theirs = stock.state_dict()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.model.state_dict().items())
    ids = random_ids(2, 9)
    torch.testing.assert_close(
        ours(ids, torch.ones_like(ids))[:, -1], stock(ids).logits[:, 0], rtol=1e-4, atol=2e-5
    )


# --------------------------------------------------------------------------------------------------
# The value head
# --------------------------------------------------------------------------------------------------
WIDE = {
    "llama": (
        LlamaConfig(
            **{**SHAPE, "hidden_size": 2048, "num_hidden_layers": 1, "intermediate_size": 8}
        ),
        2048,
    ),
    "opt-350m": (
        OPTConfig(**{**OPT, "hidden_size": 64, "num_hidden_layers": 1}, word_embed_proj_dim=2048),
        2048,
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_new_head_starts_small_and_depends_on_the_seed(name, tmp_path):
    """A new head is drawn from N(0, 1/(d+1)), d the width of what the backbone
    puts out (not hidden_size, in OPT-350M): first scores are near 0, so that
    nothing is preferred before anything is learned."""
    config, width = WIDE[name]
    folder = folder_of(tmp_path, config)

    def head(seed):
        return load_model(folder, get_args("--seed", seed), 0, None, TOKENIZER, "score").model.score

    weight = head("1").weight
    assert weight.shape == (1, width) and head("1").bias is None
    assert weight.mean().abs().item() < 4 / (width + 1) / width**0.5  # 4 standard errors
    assert weight.std().item() == pytest.approx(1 / (width + 1), rel=4 / (2 * width) ** 0.5)
    assert torch.equal(weight, head("1").weight) and not torch.equal(weight, head("2").weight)


@pytest.mark.parametrize("head_name", ["score", "value_head"])
@torch.no_grad()
def test_the_heads_name_travels_in_config_json(head_name, tmp_path):
    """--value_head_prefix names the head in the weights' file, and config.json
    keeps the name, so that the next step finds the head without being told."""
    made = load_model(
        folder_of(tmp_path / "base", CONFIGS["llama"]), get_args(), 0, None, TOKENIZER, head_name
    )
    getattr(made.model, head_name).weight.fill_(0.5)  # "trained"
    saving.save_model(made, TOKENIZER, tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved/config.json").read_text())["value_head_prefix"] == head_name
    )
    assert f"{head_name}.weight" in load_file(tmp_path / "saved/model.safetensors")
    found = load_model(
        str(tmp_path / "saved"), get_args("--seed", "7"), 0, None, TOKENIZER, "score"
    )
    assert getattr(found.model, head_name).weight.eq(0.5).all()
    ids = random_ids(2, 9)
    assert torch.equal(
        found.eval()(ids, torch.ones_like(ids)), made.eval()(ids, torch.ones_like(ids))
    )


# --------------------------------------------------------------------------------------------------
# Tokenizers: with, without, and with an unhelpful padding token
# --------------------------------------------------------------------------------------------------
def tokenizer_folder(path, vocab_size=VOCAB, pad_name="<pad>", **special):
    """The toy's tokenizer with other special tokens, beside a model of `vocab_size` rows."""
    folder_of(path, LlamaConfig(**{**SHAPE, "vocab_size": vocab_size}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / file).read_text().replace("<pad>", pad_name)
        if file == "tokenizer_config.json":
            settings = {
                k: v
                for k, v in json.loads(text).items()
                if k
                not in (
                    "pad_token",
                    "eos_token",
                    "additional_special_tokens",
                    "extra_special_tokens",
                )
            }
            text = json.dumps({**settings, **special})
        (path / file).write_text(text)
    return str(path)


@pytest.mark.parametrize("pad", [{}, {"pad_token": "<eos>"}], ids=["no pad", "pad is eos"])
def test_a_padding_token_that_is_not_eos_is_found(pad, tmp_path):
    """Many tokenizers have no padding token, or use EOS for it. Ours needs
    neither, but stock transformers finds the end of a text by it, so another
    one is taken where the vocabulary has one to spare."""
    tokenizer = model_folders.load_tokenizer(tokenizer_folder(tmp_path, eos_token="<eos>", **pad))
    assert tokenizer.pad_token == "<pad>" and tokenizer.eos_token == "<eos>"
    assert len(tokenizer) == len(TOKENIZER), "nothing was added"


@pytest.mark.parametrize("pad", [{}, {"pad_token": "<eos>"}], ids=["no pad", "pad is eos"])
@pytest.mark.parametrize("spare", [SPARE, 0])
def test_a_padding_token_is_added_only_where_the_embedding_has_room(spare, pad, tmp_path):
    """With unused rows in the embedding a new <|pad|> gets one of them; with none,
    padding stays EOS: the model is never resized, and all ids stay valid."""
    folder = tokenizer_folder(
        tmp_path, len(TOKENIZER) + spare, pad_name="<other>", eos_token="<eos>", **pad
    )
    tokenizer = model_folders.load_tokenizer(folder)
    assert tokenizer.eos_token_id == 1 and tokenizer.pad_token_id < len(TOKENIZER) + spare
    assert tokenizer.pad_token == ("<|pad|>" if spare else "<eos>")
    assert rows.tokenise_response(tokenizer, " yes")[-1] == tokenizer.eos_token_id


def test_a_tokenizer_that_cannot_end_an_answer_is_refused(tmp_path, capsys):
    """Without EOS no answer could ever end: exit code 2 and one message, before
    any model is loaded."""
    with pytest.raises(SystemExit) as stop:
        model_folders.load_tokenizer(tokenizer_folder(tmp_path))
    assert stop.value.code == 2 and "EOS" in capsys.readouterr().err


def test_a_tokenizer_larger_than_its_model_is_refused(tmp_path, capsys):
    """An id beyond the embedding would be read from memory that is not its own,
    or crash much later."""
    with pytest.raises(SystemExit) as stop:
        model_folders.load_tokenizer(
            tokenizer_folder(tmp_path, len(TOKENIZER) - 1, eos_token="<eos>", pad_token="<pad>")
        )
    assert stop.value.code == 2 and str(len(TOKENIZER)) in capsys.readouterr().err


@pytest.mark.parametrize("spare", [SPARE, 0])
@torch.no_grad()
def test_a_value_model_is_scored_alike_when_padding_is_eos(spare, tmp_path):
    """Our masks come from lengths, so EOS as padding is no trouble: the score
    of a text that ends in EOS is the same in a padded batch and alone."""
    folder = tokenizer_folder(
        tmp_path, len(TOKENIZER) + spare, pad_name="<other>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer = model_folders.load_tokenizer(folder)
    model = load_model(folder, get_args(), 0, None, tokenizer, "score").eval()
    texts = [row + [tokenizer.eos_token_id] for row in RAGGED]
    together = model(*common.pad(texts, tokenizer.pad_token_id))[:, -1]
    alone = torch.cat([model(*common.pad([t], tokenizer.pad_token_id))[:, -1] for t in texts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=2e-5)
    # stock transformers must be able to tell padding from EOS, or must be told that it cannot
    assert model.model.config.pad_token_id == (None if spare == 0 else tokenizer.pad_token_id)
