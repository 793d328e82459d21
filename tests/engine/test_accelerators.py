"""What a GPU needs, checked without one: a stand-in answers where CUDA would."""

import os
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import fused_adam
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder as CudaBuilder
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import common
import ppo
from machinery import adam, folders, launch, patches, ranks, shared_prompts, zero3
from tests import kit
from tests.runs import facts


@pytest.fixture
def cuda(monkeypatch):
    """Every question for the device is answered as on a GPU that holds 10 bytes of 100, and for the
    CUDA toolkit as where there is none."""
    monkeypatch.setattr(adam.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "cuda")
    monkeypatch.setattr(ranks, "device", lambda: torch.device("cuda", 0))
    answers = dict(is_available=True, memory_reserved=30, memory_allocated=10)
    answers |= dict(mem_get_info=(70, 100), get_device_capability=(9, 0), device_count=1)
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.parametrize("numel, room, fits", [(17, 3, True), (18, 0, False), (17, 4, False)])
def test_room_on_a_gpu_is_what_cuda_and_its_allocator_have_free(
    cuda, monkeypatch, numel, room, fits
):
    """70 bytes that CUDA has and 20 that PyTorch holds and does not use: 0.8 of them is 72, for the
    weights and for what a rollout holds beside them. DeepSpeed asks the driver, by the number in
    CUDA_VISIBLE_DEVICES, which may be a name (MIG)."""
    monkeypatch.setattr(get_accelerator(), "available_memory", lambda: int("MIG-1"))
    monkeypatch.setattr(ranks, "all_sum", lambda *values: values)
    weight = SimpleNamespace(ds_numel=numel, element_size=lambda: 4)
    assert zero3.fit_on_every_rank([weight], room) is fits


def test_a_rollout_asks_for_what_it_holds(tiny_model, monkeypatch, tokenizer):
    """Weights alone may fit where the cache does not, and the rollout ends out of memory. By hand,
    2 rows of 6 + 4 tokens: a key and a value of 4 heads of 8 numbers in both layers, 16 hidden
    states of 32 for each of a prompt's tokens, 4 bytes each; and for each entry of the vocabulary 4
    bytes and 24."""
    asked = []
    monkeypatch.setattr(zero3, "gather_for_generation", lambda *given: asked.append(given[1]))
    args = ppo.get_args("--preset toy --max_answer_seq_len 4".split())
    prompts = [{"prompt_ids": [5] * n} for n in (2, 6, 3)]
    with pytest.raises(TypeError):  # that was no context
        ppo.roll_out(args, tiny_model, tokenizer, prompts, 0, 2)
    numbers = 10 * 2 * 2 * 4 * 8 + 6 * 16 * 32
    assert asked == [2 * (4 * numbers + 28 * tiny_model.config.vocab_size)]


@pytest.mark.parametrize("given", [None, "1", "3"])
@pytest.mark.parametrize("torchrun", [False, True])
@pytest.mark.parametrize("adam_offload", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_rank_takes_its_share_of_the_cores(monkeypatch, given, torchrun, adam_offload, device):
    """Two ranks on 8 cores. CPU Adam is a loop over all weights of the rank: on one thread, or on
    as many as there are cores in every rank, it takes several times as long. What the user has said
    stands, but for the 1 that torchrun says."""
    said = {"OMP_NUM_THREADS": given, "TORCHELASTIC_RUN_ID": "x" if torchrun else None}
    for name, value in {**said, "LOCAL_WORLD_SIZE": None, "LOCAL_SIZE": "2"}.items():
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    taken = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(ranks, "device", lambda: torch.device(device))
    launch.share_cores(SimpleNamespace(adam_offload=adam_offload))
    torchruns = torchrun and adam_offload and given == "1"
    computes = adam_offload or device == "cpu"
    assert taken == [4] * (computes and (given is None or torchruns))


# --------------------------------------------------------------------------------------------------
# Adam
# --------------------------------------------------------------------------------------------------
def built_adam(offload=False, stage=2):
    given = dict(adam_betas=[0.9, 0.95], learning_rate=1e-3, weight_decay=0.1, zero_stage=stage)
    args = SimpleNamespace(**given, adam_offload=offload, offload_states=True)
    model = torch.nn.Linear(2, 1)
    model.weight.ds_shape, model.weight.data = (1, 2), model.weight.data.flatten()  # a shard
    return adam.build_optimizer(model, args)


def test_without_a_compiler_pytorchs_adam_takes_over(monkeypatch, capsys):
    """pip's CUDA wheels come without nvcc. PyTorch's default on a GPU is foreach, which needs
    temporary tensors as large as the weights. Where a flag needs DeepSpeed's, it is refused: stage
    3 moves its own Adam's states only."""
    for name in ("FusedAdam", "DeepSpeedCPUAdam"):
        monkeypatch.setattr(adam, name, lambda *_, **__: 1 / 0)
    optimizer = built_adam()
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]  # no bias
    assert "division by zero" in capsys.readouterr().out
    for offload, stage in ((False, 3), (True, 2)):
        with kit.refuses("adam-not-built"):
            built_adam(offload, stage)


def test_without_nvcc_no_gpu_takes_a_cpus_operator(cuda, monkeypatch, capsys, tmp_path):
    """FusedAdam has one name on CPUs and on GPUs: a CPU's build that lies there would crash in the
    first step. And who cannot build leaves no lock for which other ranks would wait."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(fused_adam, "FusedAdamBuilder", CudaBuilder)
    monkeypatch.setattr(launch.OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(launch.OpBuilder, "jit_load", launch.load)
    (tmp_path / "fused_adam").mkdir()
    (tmp_path / "fused_adam/fused_adam.so").touch()
    built_adam(), built_adam()
    said = capsys.readouterr().out
    assert "CUDA_HOME" in said and said.count("torch's AdamW takes its place") == 2


# --------------------------------------------------------------------------------------------------
# Attention
# --------------------------------------------------------------------------------------------------
def test_no_run_attends_by_cudnn():
    """Its gradient is NaN for some lengths and heads (patches.do_without_cudnn_attention). PyTorch
    has it on by default, and takes it first on new GPUs. And a run has one mask for all layers."""
    assert {(rank["cudnn"], rank["mask"]) for rank in facts("sft_zero0")} == {
        (False, "additive_mask")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
def test_all_layers_keep_one_mask(monkeypatch, shared, dtype):
    """Given True and False, PyTorch makes a mask of numbers in each layer and keeps it for the
    backward: 2 rows T^2 bytes a layer in bf16. With one for all the bits are the same, for rows
    that are padded and for rows that share a prompt. Rows of 11 numbers begin at multiples of
    16."""
    if shared:  # a row of 3 + (1 + 2) + (1 + 4) tokens
        responses = [{"prompt_ids": [5, 6, 7, 8], "response_ids": ids} for ids in ([9, 2], [4] * 4)]
        layout = shared_prompts.shared_rows(responses, 0, 2)
        wanted = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    else:
        given = common.pad([[5, 6, 7], [*range(20, 31)]], 0)
        layout, wanted = common.last_columns(*given, 2), torch.ones(2, 2)
    masks, found = [], []

    def note(tensor):
        if tensor.dim() == 4 and tensor.shape[2:] == (11, 11):
            masks[-1][tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for mask_function, mask_for in (
        (sdpa_mask, lambda model, mask: mask),  # the libraries' own way
        (patches.additive_mask, folders.mask_for),
    ):
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", mask_function)
        monkeypatch.setattr(folders, "mask_for", mask_for)
        masks.append({})
        model = kit.make_tiny_model().to(dtype)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logprobs = common.response_logprobs(model, layout, wanted)
        logprobs.sum().backward()
        found.append([logprobs, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))
    rows = len(layout.ids)
    assert len(masks[0]) == 2 and [*masks[1].values()] == [rows * 11 * 16 * dtype.itemsize]
