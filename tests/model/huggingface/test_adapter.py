"""Adapters are those of peft: losses, gradients and trained factors, and directories both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx.model.huggingface.adapter import (
    export_peft,
    in_floating_point,
    merge_adapters,
    open_peft_adapter,
    read_config,
)
from phalanx.model.huggingface.checkpoint import open_hf_weights
from phalanx.model.huggingface.export import export_hf
from phalanx.model.init import DrawnWeights, with_adapter
from phalanx.model.transformer import Transformer
from phalanx.parallel.init_parameters import init_parameters
from phalanx.parallel.strategy import Strategy
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.model import ModelSpec
from phalanx.spec.tuning import AdapterSpec, TuningSpec
from tests.helpers.small_runs import BIASED_EXPERTS
from tests.model.huggingface.test_checkpoint_traps import EAGER, fp32_as_fp64, fp64_by_default

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")

COMMON = {"vocab_size": 64, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
WIDE_SIZES = {**SIZES, "hidden_size": 64, "intermediate_size": 128}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, **SIZES),
    "wide llama": lambda: transformers.LlamaConfig(**COMMON, **WIDE_SIZES),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "phi3": lambda: transformers.Phi3Config(**COMMON, **SIZES),
    "wide phi3": lambda: transformers.Phi3Config(**COMMON, **WIDE_SIZES),
    "cohere": lambda: transformers.CohereConfig(**COMMON, **SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON,
        **SIZES,
        experts_implementation="eager",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=8,
    ),
    "qwen3_moe with a dense layer": lambda: transformers.Qwen3MoeConfig(
        **COMMON,
        **SIZES,
        experts_implementation="eager",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=8,
        mlp_only_layers=[0],
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **COMMON,
        **{**SIZES, "num_key_value_heads": 4},
        experts_implementation="eager",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **COMMON,
        **SIZES,
        experts_implementation="eager",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        head_dim=8,
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **COMMON,
        **SIZES,
        experts_implementation="eager",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
}
DENSE_LAYERS = ["qwen3_moe with a dense layer", "deepseek_v3", "glm4_moe"]
"""Models with experts in some layers, and with names of experts in the others."""
ADAPTER = AdapterSpec(rank=3, alpha=6.0)
NF4 = ADAPTER.replace(base_dtype="nf4")
RSLORA = AdapterSpec(rank=4, alpha=2.0, rslora=True)
DORA = AdapterSpec(rank=3, alpha=6.0, dora=True)
EXPERTS = AdapterSpec(rank=3, alpha=6.0, targets=("wq", "experts.gate", "experts.up", "experts.down"))
TOKENS = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(3))


def logits_of(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    """Return the logits of a model of transformers, whose norms and positions compute in fp64."""
    with fp32_as_fp64():
        return model(tokens).logits


def make_base(kind: str, folder: Path) -> tuple[Any, Path]:
    """Return a random model of transformers in fp64, and its directory."""
    torch.manual_seed(1)
    with fp64_by_default(), fp32_as_fp64():
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), **EAGER).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(torch.rand(parameter.shape, dtype=torch.float32))
    model.save_pretrained(folder / "base")
    return model, folder / "base"


def make_model(base: Path, adapter: AdapterSpec, factors: Any = None) -> tuple[ModelSpec, Transformer]:
    """Return the model of a directory with adapters, in fp64."""
    spec = load_model_spec(str(base)).model_copy(update={"tuning": TuningSpec(adapter=adapter)})
    model = Transformer(spec).double()
    weights = with_adapter(
        open_hf_weights(base, spec.without_tuning), factors(spec) if factors else DrawnWeights(spec, 5)
    )
    init_parameters(Strategy(model), weights)
    return spec, model


def randomize(model: nn.Module) -> None:
    """Give B and magnitudes of each adapter random numbers, which fp32 represents."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        elif "lora_magnitude" in name:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def read_model(folder: Path) -> Any:
    """Return a model of transformers in fp64."""
    with fp64_by_default():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **EAGER)


@pytest.mark.parametrize(
    "adapter",
    [ADAPTER, RSLORA, DORA, NF4, NF4.replace(dora=True)],
    ids=["lora", "rslora", "dora", "nf4", "nf4-dora"],
)
def test_losses_gradients_and_trained_adapters_equal_those_of_peft(adapter: AdapterSpec, tmp_path: Path) -> None:
    """The matrices of peft's model are those that 4 bits represent."""
    base, folder = make_base("wide llama" if adapter.base_dtype else "llama", tmp_path)
    spec, model = make_model(folder, adapter)
    if adapter.base_dtype:
        tensors = in_floating_point(spec, {name: each.detach() for name, each in model.named_parameters()})
        export_hf(spec.without_tuning, tensors, tmp_path / "rounded", source=folder)
        rounded = read_model(tmp_path / "rounded").state_dict()
        base.load_state_dict({name: each for name, each in rounded.items() if "_proj" in name}, strict=False)
    for parameter in trained(model):
        parameter.data.copy_(parameter.data.float())
    export_peft(spec, dict(model.named_parameters()), tmp_path / "adapter")
    other = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False)
    assert sum(p.numel() for p in trained(other)) == sum(p.numel() for p in trained(model))
    optimizers = [torch.optim.AdamW(trained(each), lr=0.01) for each in (model, other)]
    for step in range(4):
        logits, _ = model(TOKENS[:, :-1])
        losses = [
            nn.functional.cross_entropy(each.flatten(0, 1), TOKENS[:, 1:].flatten())
            for each in (logits, logits_of(other, TOKENS[:, :-1]))
        ]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-8), step
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        norms = [nn.utils.get_total_norm([p.grad for p in trained(each)]).item() for each in (model, other)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-8), step
        for optimizer in optimizers:
            optimizer.step()
    for layer in range(2):
        for name, module in (("attention.wk", "self_attn.k_proj"), ("mlp.down", "mlp.down_proj")):
            for factor in ["A", "B", *(["magnitude"] if adapter.dora else [])]:
                mine = model.get_parameter(f"blocks.{layer}.{name}_lora_{factor}.weight")
                leaf = f"lora_{factor}{'_vector' if factor == 'magnitude' else ''}.default.weight"
                theirs = other.get_parameter(f"base_model.model.model.layers.{layer}.{module}.{leaf}")
                torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


CHANGES: dict[str, dict[str, Any]] = {
    "adapters": {},
    "and norms": {"train": ("norm.*", "blocks.1.attention_norm.*")},
    "with dropout": {"dropout": 0.5},
    "and experts": {"targets": ("wq", "gate", "up", "down", "experts.gate", "experts.up", "experts.down")},
    "dora": {"dora": True},
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(
            (kind, changes)
            for kind in CONFIGS
            if kind not in DENSE_LAYERS
            for changes in ("adapters", "and norms", "dora")
        ),
        *((kind, changes) for kind in DENSE_LAYERS for changes in ("with dropout", "and experts")),
    ],
)
def test_exported_adapter_gives_equal_logits_in_peft_and_is_read_back(kind: str, changes: str, tmp_path: Path) -> None:
    base, folder = make_base(kind, tmp_path)
    adapter = RSLORA.replace(**CHANGES[changes])
    spec, model = make_model(folder, adapter)
    randomize(model)
    if adapter.train:
        model.get_parameter("norm.weight").data.fill_(1.5)
    logits, _ = model(TOKENS)
    directory = tmp_path / "adapter"
    export_peft(spec, dict(model.named_parameters()), directory, source=folder)
    other = peft.PeftModel.from_pretrained(base, directory, autocast_adapter_dtype=False)
    torch.testing.assert_close(logits_of(other), logits, rtol=1e-8, atol=1e-10)
    _, read = make_model(folder, adapter, lambda spec: open_peft_adapter(directory, spec, read_config(folder)))
    assert all(torch.equal(mine, each) for mine, each in zip(model.parameters(), read.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "adapter"), [("qwen3_moe", EXPERTS), ("qwen3_moe", EXPERTS.replace(rslora=True)), ("qwen2_moe", EXPERTS)]
)
def test_losses_and_gradients_of_experts_equal_those_of_peft(kind: str, adapter: AdapterSpec, tmp_path: Path) -> None:
    """It has adapters of all experts in one tensor, those of gate and up as blocks."""
    base, folder = make_base(kind, tmp_path)
    spec, model = make_model(folder, adapter)
    randomize(model)
    directory = tmp_path / "adapter"
    export_peft(spec, dict(model.named_parameters()), directory, source=folder)
    other = peft.PeftModel.from_pretrained(base, directory, is_trainable=True, autocast_adapter_dtype=False)
    for logits in (model(TOKENS[:, :-1])[0], logits_of(other, TOKENS[:, :-1])):
        nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    torch.testing.assert_close(logits, model(TOKENS[:, :-1])[0], rtol=1e-8, atol=1e-10)
    for layer in range(2):
        theirs = other.get_submodule(f"base_model.model.model.layers.{layer}.mlp.experts")
        for module, names in ((theirs.base_layer, ("gate", "up")), (theirs, ("down",))):
            a = module.lora_A["default"].weight.grad.unflatten(0, (4, len(names), 3))
            b = module.lora_B["default"].weight.grad.unflatten(1, (len(names), 3, 4)).movedim(-1, 0)
            for block, name in enumerate(names):
                factors = [model.get_parameter(f"blocks.{layer}.mlp.experts.{name}_lora_{letter}") for letter in "AB"]
                torch.testing.assert_close(factors[0].grad, a[:, block], rtol=1e-8, atol=1e-10)
                rows = slice(block * factors[1].shape[1], (block + 1) * factors[1].shape[1])
                torch.testing.assert_close(factors[1].grad, b[:, rows, block], rtol=1e-8, atol=1e-10)
    _, read = make_model(folder, adapter, lambda spec: open_peft_adapter(directory, spec, read_config(folder)))
    assert all(torch.equal(mine, each) for mine, each in zip(model.parameters(), read.parameters(), strict=True))


@pytest.mark.parametrize("base_dtype", [None, "nf4"])
def test_magnitudes_of_a_part_of_a_module_are_exported_and_read_back(base_dtype: str | None, tmp_path: Path) -> None:
    base, folder = make_base("phi3" if base_dtype is None else "wide phi3", tmp_path)
    adapter = DORA.replace(targets=("wq",), base_dtype=base_dtype)
    spec, model = make_model(folder, adapter)
    randomize(model)
    directory = tmp_path / "adapter"
    export_peft(spec, dict(model.named_parameters()), directory, source=folder)
    if base_dtype is None:
        other = peft.PeftModel.from_pretrained(base, directory, autocast_adapter_dtype=False)
        # The norms of the other rows have the precision of the file.
        torch.testing.assert_close(logits_of(other), model(TOKENS)[0], rtol=1e-4, atol=1e-5)
    weights = open_hf_weights(folder, spec.without_tuning)
    _, read = make_model(
        folder, adapter, lambda spec: open_peft_adapter(directory, spec, read_config(folder), base=weights)
    )
    assert all(torch.equal(mine, each) for mine, each in zip(model.parameters(), read.parameters(), strict=True))
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_magnitude_vector"][-1] *= 1.1
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"has magnitudes of blocks\.0\.attention\.wv\.weight too"):
        open_peft_adapter(directory, spec, read_config(folder), base=weights)


MERGED = [(kind, adapter) for kind in CONFIGS for adapter in (ADAPTER, DORA)]
MERGED += [("qwen3_moe", EXPERTS), ("wide llama", NF4)]


@pytest.mark.parametrize(("kind", "adapter"), MERGED)
def test_merged_export_gives_equal_logits_in_transformers(kind: str, adapter: AdapterSpec, tmp_path: Path) -> None:
    _, folder = make_base(kind, tmp_path)
    spec, model = make_model(folder, adapter)
    randomize(model)
    logits, _ = model(TOKENS)
    export_hf(spec.without_tuning, merge_adapters(spec, model.state_dict()), tmp_path / "merged", source=folder)
    torch.testing.assert_close(logits_of(read_model(tmp_path / "merged")), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapter", [ADAPTER, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_adapter_of_peft_gives_equal_logits(kind: str, adapter: AdapterSpec, tmp_path: Path) -> None:
    """Products of one fused module share A."""
    base, folder = make_base(kind, tmp_path)
    config = peft.LoraConfig(
        r=3, lora_alpha=6.0, target_modules="all-linear", fan_in_fan_out=kind == "gpt2", use_dora=adapter.dora
    )
    other = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    randomize(other)
    other.save_pretrained(tmp_path / "adapter")
    _, model = make_model(
        folder, adapter, lambda spec: open_peft_adapter(tmp_path / "adapter", spec, read_config(folder))
    )
    logits, _ = model(TOKENS)
    torch.testing.assert_close(logits, logits_of(other), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("stacks", [["gate_up_proj", "down_proj"], ["gate_up_proj"], ["down_proj"]])
def test_adapter_of_experts_of_peft_gives_equal_logits(stacks: list[str], tmp_path: Path) -> None:
    """Gate and up of an expert share A."""
    base, folder = make_base("qwen3_moe", tmp_path)
    parameters = [f"mlp.experts.{name}" for name in stacks]
    config = peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=["q_proj"], target_parameters=parameters)
    other = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    randomize(other)
    other.save_pretrained(tmp_path / "adapter")
    products = {"gate_up_proj": ("experts.gate", "experts.up"), "down_proj": ("experts.down",)}
    adapter = ADAPTER.replace(targets=("wq", *(product for name in stacks for product in products[name])))
    _, model = make_model(
        folder, adapter, lambda spec: open_peft_adapter(tmp_path / "adapter", spec, read_config(folder))
    )
    torch.testing.assert_close(model(TOKENS)[0], logits_of(other), rtol=1e-8, atol=1e-10)


def test_experts_that_a_checkpoint_transposes_are_exported_merged_only(tmp_path: Path) -> None:
    spec = ModelSpec.model_validate(BIASED_EXPERTS).model_copy(update={"tuning": TuningSpec(adapter=EXPERTS)})
    model = Transformer(spec)
    with pytest.raises(UserError, match=r"(?s)adapts experts, for which.*gpt_oss are not known.*use --to hf"):
        export_peft(spec, dict(model.named_parameters()), tmp_path / "adapter")


@pytest.mark.parametrize("kind", DENSE_LAYERS)
def test_magnitudes_of_dense_layers_that_peft_takes_for_experts_are_exported_merged_only(
    kind: str, tmp_path: Path
) -> None:
    _, folder = make_base(kind, tmp_path)
    spec, model = make_model(folder, DORA)
    with pytest.raises(UserError, match=r"(?s)adapter\.dora.*model\.layers\.0\.mlp\.gate_proj in.*use --to hf"):
        export_peft(spec, dict(model.named_parameters()), tmp_path / "adapter", source=folder)
    assert not (tmp_path / "adapter").exists()


def test_head_that_peft_saves_is_trained_too(tmp_path: Path) -> None:
    base, folder = make_base("llama", tmp_path)
    config = peft.LoraConfig(r=3, lora_alpha=6.0, target_modules="all-linear", modules_to_save=["lm_head"])
    other = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    other.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(2)
    other.save_pretrained(tmp_path / "adapter")

    def read(adapter: AdapterSpec) -> Transformer:
        return make_model(folder, adapter, lambda spec: open_peft_adapter(tmp_path / "adapter", spec))[1]

    model = read(ADAPTER.replace(train=("head.*",)))
    assert model.get_parameter("head.weight").requires_grad
    torch.testing.assert_close(model(TOKENS)[0], logits_of(other), rtol=1e-8, atol=1e-10)
    with pytest.raises(UserError, match=r"lm_head.weight.* belongs to no adapter"):
        read(ADAPTER)


def test_adapter_of_other_products_rank_or_kind_is_refused(tmp_path: Path) -> None:
    _, folder = make_base("llama", tmp_path)
    spec, model = make_model(folder, ADAPTER)
    directory = tmp_path / "adapter"
    export_peft(spec, dict(model.named_parameters()), directory)

    def read(adapter: AdapterSpec) -> None:
        make_model(folder, adapter, lambda spec: open_peft_adapter(directory, spec))

    with pytest.raises(UserError, match=r"set adapter.rank = 3 and adapter.alpha = 6"):
        read(AdapterSpec(rank=4, alpha=6.0))
    with pytest.raises(UserError, match=r"set adapter.rank = 3"):
        read(AdapterSpec(rank=4, alpha=8.0))
    with pytest.raises(UserError, match="belongs to no adapter of the model"):
        read(AdapterSpec(rank=3, alpha=6.0, targets=("wq",)))
    table = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(table | {"use_dora": True}))
    with pytest.raises(UserError, match=r"adapter.dora = False is not what (?s:.*) set adapter.dora = true"):
        read(ADAPTER)
    (directory / "adapter_config.json").write_text(json.dumps(table))
    tensors = load_file(directory / "adapter_model.safetensors")
    save_file(
        {name: x for name, x in tensors.items() if ".q_proj." not in name}, directory / "adapter_model.safetensors"
    )
    with pytest.raises(UserError, match=r"has no adapter of model\.layers\.0\.self_attn\.q_proj"):
        read(ADAPTER)
