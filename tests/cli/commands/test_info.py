import json
import re
from functools import partial

import pytest

from phalanx.spec.errors import UserError
from tests.helpers import cli_runner

info_output = partial(cli_runner.command_output, "info")
info_json = partial(cli_runner.command_json, "info")


def test_info_prints_parameters_flops_and_state_bytes():
    text = info_output("llama3-8b")
    for part in ("8,030,261,248", "32 layers", "FLOPs per token at 8,192", "51.5 G", "57.9 G", "128 GB"):
        assert part in text
    assert "experts" not in text


def test_info_json_contains_parameter_flop_and_byte_counts():
    facts = info_json("mixtral-8x7b", "--sequence", 4096)
    assert facts["parameters"]["total"] == 46_702_792_704
    assert facts["sequence"] == 4096
    flops = facts["flops_per_token"]
    assert flops["training_causal"] < flops["training_full"] == pytest.approx(3 * flops["forward_full"])
    assert facts["state_bytes"]["adamw"]["total"] == 16 * 46_702_792_704


def test_info_counts_flops_within_sliding_window(tmp_path):
    flops = {}
    for window in (4096, None):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "sliding_window": window}))
        facts = info_json(tmp_path)
        assert facts["sequence"] == 131_072
        flops[window] = facts["flops_per_token"]["forward_causal"]
    keys = 4096 - 4096**2 / (2 * 131_072)
    assert flops[None] - flops[4096] == pytest.approx(4 * 32 * 4096 * (131_072 / 2 - keys))


def test_info_list_prints_model_and_machine_presets():
    text = info_output("--list")
    assert "12.9 B" in text
    assert re.search(r"h100 +989.4 +80 +3350 +450 +8 +50 +700\n", text)
    assert re.search(r"l4 +121 +24 +300 +31.5 +node +1.562 +72\n", text)
    assert max(map(len, text.splitlines())) <= 80
    presets = info_json("--list")
    assert presets["models"]["gpt2-124m"] == {"total": 124_439_808, "active": 124_439_808}
    assert presets["machines"]["a100"]["link_bytes_per_second"] == 300e9
    assert "watts_per_device" not in presets["machines"]["tpuv5e"]


def test_info_accepts_run_file_and_hugging_face_config(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('name = "x"\n[training]\nsteps = 100\n')
    assert "2,115,264" in info_output(str(run))
    config = {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "124,439,808" in info_output(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODEL is missing"),
        (["llama3-8"], "did you mean 'llama3-8b'"),
        (["gpt2-124m", "--sequence", "2048"], "--sequence = 2048 is longer than the model's learned positions"),
        (["glm-5", "--sequence", "2049"], r"--sequence = 2049 exceeds model\.mixer\.indexer\.top_k \(2048\)"),
    ],
)
def test_info_raises_user_error_for_invalid_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        info_output(*arguments)


def test_info_does_not_import_torch():
    assert "torch" not in cli_runner.imported_packages("info", "tiny")
