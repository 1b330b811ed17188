import re
import tomllib
from functools import partial
from pathlib import Path

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run, run_from_table
from phalanx.spec.files.template import LINE_WIDTH, run_file_template
from phalanx.spec.swarm import OuterOptimizerSpec, SwarmSpec
from tests.helpers import cli_runner

init_output = partial(cli_runner.command_output, "init")
DEFAULTS = run_from_table(
    {"model": {"preset": "tiny"}, "training": {"precision": "auto"}, "evaluation": {"tokens": 65536}}
)


def test_init_file_loads_as_default_run(tmp_path):
    init_output(str(tmp_path / "run.toml"))
    assert load_run(tmp_path / "run.toml", environment={}) == DEFAULTS
    assert run_from_table({}).model.preset == DEFAULTS.model.preset


def test_init_does_not_overwrite_run_file_without_force(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        init_output(str(path))
    assert path.read_text() == "mine"
    init_output(str(path), "--force")
    assert load_run(path, environment={}) == DEFAULTS


def test_init_rejects_missing_directory(tmp_path):
    with pytest.raises(UserError, match="cannot be written: No such file"):
        init_output(str(tmp_path / "nowhere" / "run.toml"))


def test_init_file_starts_with_path_of_existing_json_schema(tmp_path):
    init_output(str(tmp_path / "a.toml"))
    schema_line = re.match(r"#:schema file://(\S+)", (tmp_path / "a.toml").read_text())
    schema = Path(schema_line[1]).read_text()
    init_output(str(tmp_path / "b.toml"), "--schema")
    assert (tmp_path / "b.toml").read_text().startswith("#:schema ./run.schema.json\n")
    assert (tmp_path / "run.schema.json").read_text() == schema


UNADAPTED = ("# from_peft", "# targets", "# train")
"""Keys of adapters whose examples suit another model."""


def test_run_file_template_commented_keys_equal_defaults():
    """Each key, uncommented, leaves the run unchanged, or is an example of a field without a default."""
    examples = {
        "from_hf",
        "compile",
        "sliding_window",
        "full_attention_layers",
        "layers",
        "attention_scale",
        "attention_chunk",
        "attention_clip",
        "attention_factor",
        "mixer",
        "attention_softcap",
        "norm_after_eps",
        "value_head_dim",
        "shared_kv_ffn_size",
        "per_layer_input_size",
        "silu_limit",
        "shared_silu_limit",
        "logits_softcap",
        "query_temperature",
        "shared_ffn_size",
        "dp_shard",
        "micro_batch_size",
        "preset",
        "directory",
        "nproc_per_node",
        "peak_flops",
        "memory_bytes",
        "wandb",
        "wandb_entity",
        "wandb_group",
        "wandb_tags",
    }
    examples |= {
        "offload_directory",
        "recomputed_blocks",
        "schedule_file",
        "first_bucket_mb",
        "base_dp_size",
        "split_seq_len",
        "epochs",
        "max_staleness",
        "loss_spike_ratio",
        "seconds",
        "stop_early",
        "implementation",
        "loss",
        "lr_function",
        "dataset",
        "end_token",
    }
    examples |= {"hbm_bytes_per_second", "fast_link_domain", "link_bytes_per_second", "network_bytes_per_second"}
    examples |= {"watts_per_device", "price_per_device_hour", "matmul_flops", "matmul_flops_8bit", "num_sms"}
    examples |= {"host_watts_per_device"}
    examples |= {"cores", "price_per_kwh", "storage_bytes_per_second", "failures_per_device_hour"}
    examples |= {"host_link_bytes_per_second", "host_bytes_per_second", "host_memory_bytes", "disk_bytes_per_second"}
    text = run_file_template("run.toml", "schema")
    lines = text.splitlines()
    begin = lines.index("# [model.moe]")
    moe = slice(begin, lines.index("", begin))
    temperature = range(lines.index("# [model.query_temperature]"), lines.index("[model.rope]"))
    first = lines.index("# [model.mtp]")
    mtp = range(first, lines.index("", first))
    first = lines.index("# [adapter]")
    adapter = range(first, lines.index("", first))
    first = lines.index("# [[data.source]]")
    source = range(first, lines.index("", first))
    first = lines.index("# [data.held_out_sets]")
    sets = range(first, lines.index("", first))
    phase = range(lines.index("# [[phase]]"), lines.index("[optimizer]"))
    swarm = lines.index("# [swarm]")  # [swarm] and its tables below
    for number, line in enumerate(lines[:swarm]):
        key = re.match(r"# (\w+) = ", line)
        is_in_table = moe.start <= number < moe.stop or any(
            number in table for table in (temperature, mtp, adapter, source, sets, phase)
        )
        if key and key[1] not in examples and not is_in_table:
            table = tomllib.loads("\n".join([*lines[:number], line.removeprefix("# "), *lines[number + 1 :]]))
            assert run_from_table(table) == DEFAULTS, line
    # Without shared experts, their width has no effect.
    lines[moe] = [line if line.startswith("# shared_ffn_size") else line.removeprefix("# ") for line in lines[moe]]
    assert run_from_table(tomllib.loads("\n".join(lines))).model.moe.num_experts == 8
    adapted = [
        line.removeprefix("# ") for line in lines[adapter.start : adapter.stop] if not line.startswith(UNADAPTED)
    ]
    adapted_file = [*lines[: adapter.start], *adapted, *lines[adapter.stop :]]
    assert run_from_table(tomllib.loads("\n".join(adapted_file))).adapter.rank == 16
    # One start, and no ramp.
    named = ("# [[phase]]", "# from_share", "# tokens_per_step", "# lr_schedule")
    decay = [line.removeprefix("# ") for line in lines[phase.start : phase.stop] if line.startswith(named)]
    phase_file = [*lines[: phase.start], *decay, *lines[phase.stop :]]
    assert run_from_table(tomllib.loads("\n".join(phase_file))).phase[0].lr_schedule == "linear"
    mixture = [line.removeprefix("# ") for line in lines[source.start : source.stop]]
    mixture_file = [line for line in [*lines[: source.start], *mixture, *lines[source.stop :]] if line[:5] != "train"]
    assert run_from_table(tomllib.loads("\n".join(mixture_file))).data.source[0].weight == 0.7
    below = [line.removeprefix("# ") for line in lines[swarm:] if re.match(r"# (\[swarm|(?!codec|mixing)\w+ = )", line)]
    lines[moe] = [line.replace("bias_update_rate = ", "# ") for line in lines[moe]]
    lines = [line.replace('precision = "auto"', 'precision = "fp32"') for line in lines]  # equal on all nodes
    with_swarm = run_from_table(tomllib.loads("\n".join([*lines[:swarm], *below]))).swarm
    assert with_swarm == SwarmSpec(outer=OuterOptimizerSpec())


def test_run_file_template_lines_do_not_exceed_width():
    assert max(len(line) for line in run_file_template("run.toml", "schema").splitlines()) <= LINE_WIDTH
