"""Quantized checkpoints: decoded as transformers does, and never read raw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.model.huggingface.checkpoint import open_hf_weights
from phalanx.model.huggingface.export import export_hf
from phalanx.model.huggingface.quantized import decode_fp8, decode_mxfp4
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_model_spec
from tests.helpers.random_models import load_model
from tests.model.huggingface.test_checkpoint_traps import TOKENS, edit_config, save_random_model

BLOCK = (16, 32)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3", "activation_scheme": "dynamic"}


def random_mxfp4(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes [..., I / 32, 16] of random codes for matrices [..., I], and scales near one."""
    generator = torch.Generator().manual_seed(seed)
    groups = (*shape[:-1], shape[-1] // 32)
    numbers = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
    return numbers, torch.randint(122, 126, groups, dtype=torch.uint8, generator=generator)


def test_mxfp4_is_decoded_as_in_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    numbers, _ = random_mxfp4(2, 24, 96)
    numbers.view(-1)[:256] = torch.arange(256)
    scales = torch.randint(2, 250, numbers.shape[:-1], dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(numbers, scales)
    decoded = torch.stack([decode_mxfp4(*parts) for parts in zip(numbers, scales, strict=True)])
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded, expected)
    assert decoded.shape == (2, 96, 24)


@pytest.mark.parametrize("shape", [(32, 64), (24, 70), (5, 3)])
def test_fp8_blocks_are_decoded_as_in_transformers(shape):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    numbers = (100 * torch.randn(shape)).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1]))
    expected = fp8._dequantize_fp8_weight(numbers, scales, list(BLOCK), torch.float32)
    assert torch.equal(decode_fp8(numbers, scales, BLOCK), expected)


def test_scales_of_other_blocks_are_refused():
    with pytest.raises(UserError, match=r"scales \[2, 2\].* differ from the blocks of 16 x 32"):
        decode_fp8(torch.zeros(32, 96, dtype=torch.float8_e4m3fn), torch.ones(2, 2), BLOCK)


def rewrite(directory: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """Write the tensors of a checkpoint, with changes of its config.json."""
    save_file(
        {name: x.contiguous() for name, x in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    edit_config(directory, **config)
    return directory


def save_mxfp4(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a small gpt-oss with experts in MXFP4; return its directory, and the plain tensors."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 8}
    tensors = load_file(save_random_model(directory, "gpt_oss", **sizes) / "model.safetensors")
    plain = dict(tensors)
    for seed, name in enumerate(name for name in plain if name.endswith("_proj")):
        experts, inputs, outputs = tensors.pop(name).shape
        parts = random_mxfp4(experts, outputs, inputs, seed=seed)
        tensors |= dict(zip((f"{name}_blocks", f"{name}_scales"), parts, strict=True))
        plain[name] = torch.stack([decode_mxfp4(*part) for part in zip(*parts, strict=True)])
    return rewrite(directory, tensors, quantization_config={"quant_method": "mxfp4"}), plain


def save_fp8(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a small GLM with matrices of blocks and experts in float8; return its directory, and the plain tensors."""
    tensors = load_file(save_random_model(directory, "glm4_moe") / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        shape = tensors[name].shape
        scales = 0.02 * torch.rand(-(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1])) + 0.01
        tensors[name] = (tensors[name] / 0.02).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        plain[name] = decode_fp8(tensors[name], scales, BLOCK)
    return rewrite(directory, tensors, quantization_config=FP8), plain


SAVED = {"mxfp4": save_mxfp4, "fp8": save_fp8}


@pytest.mark.parametrize("method", SAVED)
def test_quantized_model_equals_the_decoded_one_and_is_exported_plain(tmp_path, method):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    source, plain = SAVED[method](tmp_path / "source")
    model = load_model(source)
    export_hf(model.spec, dict(model.state_dict()), tmp_path / "out", source=source)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == plain.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, plain[name].float()), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    # transformers decodes MXFP4 itself; for float8 it requires another package.
    decoded = {"quantization_config": Mxfp4Config(dequantize=True)} if method == "mxfp4" else {}
    directory = source if decoded else tmp_path / "out"
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **decoded
    )
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS)[0].float(), theirs(TOKENS).logits, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("method", "words"), [("mxfp4", "has no tensor .*_proj"), ("fp8", r"is not used by the model")]
)
def test_quantized_tensors_without_the_field_of_their_encoding_are_refused(tmp_path, method, words):
    source, _ = SAVED[method](tmp_path)
    edit_config(source, "quantization_config")
    with pytest.raises(UserError, match=words):
        load_model(source)


def test_float8_tensor_without_scales_is_refused(tmp_path):
    source, _ = save_fp8(tmp_path)
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    rewrite(source, {other: tensor for other, tensor in tensors.items() if other != name})
    with pytest.raises(UserError, match=rf"{name.removesuffix('_scale_inv')}.*is quantized \(torch\.float8"):
        load_model(source)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq"}, "quant_method = 'awq' is not supported"),
        ({"quant_method": "compressed-tensors"}, "quant_method = 'compressed-tensors' is not supported"),
        ({"bits": 4}, "quant_method is not supported"),
        ({**FP8, "weight_block_size": None}, "weight_block_size is not supported"),
    ],
)
def test_other_encodings_are_refused_by_name(tmp_path, quantization, words):
    edit_config(save_random_model(tmp_path, "llama"), quantization_config=quantization)
    with pytest.raises(UserError, match=words):
        open_hf_weights(tmp_path, load_model_spec(str(tmp_path)))
