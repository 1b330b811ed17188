import json

import pytest

from phalanx.spec.base import parse_table
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import (
    load_machine,
    load_model_spec,
    load_run,
    preset_names,
    require_run_file,
    resolve_model,
    run_from_table,
)
from phalanx.spec.files.write import to_toml, with_absolute_paths
from phalanx.spec.layout import check_inapplicable_options
from phalanx.spec.model import ModelSpec
from phalanx.spec.resolved_run import ResolvedRun


def write_run_file(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


INVALID_RUNS = [
    # text of the run file, named field, printed value, and a part of the fix
    ('[training]\nsteps = "many"', "training.steps", "'many'", "write a whole number, such as steps = 4"),
    ("[training]\nsteps = 1.5", "training.steps", "1.5", "write a whole number"),
    ("[training]\nsteps = 0", "training.steps", "0", "increase steps"),
    ("[training]\nstep = 5", "training.step", "5", "did you mean 'steps'?"),
    ("[trainin]\nsteps = 5", "trainin", "", "did you mean 'training'?"),
    ("[training]\ntokens_per_step = 1000", "training.tokens_per_step", "1000", "use 1024"),
    ("training = 5", "training", "5", "write a table: [training]"),
    ('[optimizer]\nname = "adam"', "optimizer.name", "'adam'", "did you mean 'adamw'?"),
    ("[optimizer]\nlearning_rate = inf", "optimizer.learning_rate", "inf", "write a finite number"),
    ('[optimizer]\nlearning_rate = "1e-3"', "optimizer.learning_rate", "'1e-3'", "write a number"),
    ("[optimizer]\nbetas = [0.9]", "optimizer.betas[1]", "", "set betas[1]"),
    ("[optimizer]\nbetas = 0.9", "optimizer.betas", "0.9", "write a list in brackets"),
    ("[optimizer]\nlr = 1e-3", "optimizer.lr", "0.001", "did you mean 'learning_rate'?"),
    ("[cluster]\nprice_per_hour = 2", "cluster.price_per_hour", "2", "did you mean 'price_per_device_hour'?"),
    ("[data]\ntrain = 3", "data.train", "3", "train = [3]"),
    ('[training]\nsteps = "2k"', "training.steps", "'2k'", "without a unit: steps = 2048 (2 x 2^10), or steps = 2000"),
    ('[training]\nseconds = "1.5k"', "training.seconds", "'1.5k'", "seconds = 1536 (1.5 x 2^10), or seconds = 1500"),
    (
        '[cluster]\nmemory_bytes = "80 GiB"',
        "cluster.memory_bytes",
        "'80 GiB'",
        "memory_bytes = 85899345920 (80 x 2^30)",
    ),
    ("[data]\ntrain = [1]", "data.train[0]", "1", "write text in quotes"),
    ('[data]\nstreaming = "yes"', "data.streaming", "'yes'", "streaming = true or streaming = false"),
    ('[model]\npreset = "llama3-8"', "model.preset", "'llama3-8'", "did you mean 'llama3-8b'?"),
    ('[model]\npreset = "x"', "model.preset", "'x'", "use one of: command-r7b"),
    ('[model]\nfrom_hf = "/nowhere"', "model.from_hf", "'/nowhere'", "a directory that save_pretrained has written"),
    ("[model]\nnum_heads = 5", "model.num_heads", "5", "use one of 1, 2, 3"),
    ("[model]\nnum_heads = true", "model.num_heads", "True", "write a whole number"),
    ("[model]\nnum_kv_heads = 2", "model.num_kv_heads", "2", "use one of 1, 3"),
    ("[model]\nhead_dim = 63", "model.head_dim", "63", "use an even number"),
    ("[model]\nbias = true", "model.bias", "True", "set model.bias = false"),
    ('model = "tiny"', "model", "'tiny'", "write a table: [model]"),
    ("[model]\nhidden_size = 64", "model.vocab_size", "", "set vocab_size"),
    ("[model.rope]\nthetta = 1", "model.rope.thetta", "1", "did you mean 'theta'?"),
    ("[model.moe]\nnum_experts = 4\ntop_k = 5\nexpert_ffn_size = 8", "model.moe.top_k", "5", "use at most 4"),
    (
        "[model.moe]\nnum_experts = 4\ntop_k = 2\nexpert_ffn_size = 8\nnum_leading_dense_layers = 3",
        "model.moe.num_leading_dense_layers",
        "3",
        "use at most 2",
    ),
    ('[cluster]\npreset = "h1000"', "cluster.preset", "'h1000'", "did you mean 'h100'?"),
    ('[cluster]\npreset = "A100-80GB"', "cluster.preset", "'A100-80GB'", "did you mean 'a100'?"),
    ('[cluster]\npreset = "V100"', "cluster.preset", "'V100'", "did you mean 'v100-16gb' or 'v100-32gb'?"),
    ('[cluster]\npreset = "mi250x"', "cluster.preset", "'mi250x'", "did you mean 'mi250x-gcd'?"),
    ("[cluster]\nwatts_per_device = 0", "cluster.watts_per_device", "0", "increase watts_per_device"),
    ("[cluster]\noversubscription = 0.5", "cluster.oversubscription", "0.5", "increase oversubscription"),
    ('[layout]\ndata_parallel = "fsdp"', "layout.data_parallel", "'fsdp'", "use one of these values"),
    ("[layout]\ntp = 0", "layout.tp", "0", "increase tp"),
    ("[layout]\nrecomputed_blocks = 0", "layout.recomputed_blocks", "0", "increase recomputed_blocks"),
    ('[layout]\nrecomputed_blocks = "all"', "layout.recomputed_blocks", "'all'", "write a whole number"),
    ("[layout]\nrecomputed_blocks = [1, -1]", "layout.recomputed_blocks[1]", "-1", "increase recomputed_blocks[1]"),
    ('name = "a/b"', "name", "'a/b'", "use letters, digits"),
]


@pytest.mark.parametrize(("text", "field", "value", "fix"), INVALID_RUNS, ids=[text for text, *_ in INVALID_RUNS])
def test_load_run_reports_field_value_and_fix_of_invalid_setting(tmp_path, text, field, value, fix):
    with pytest.raises(UserError) as error:
        load_run(write_run_file(tmp_path, text), environment={})
    message = str(error.value)
    assert any(line.startswith(f"{field} = {value} " if value else f"{field} ") for line in message.splitlines())
    assert fix in message
    assert "tuple[" not in message  # a type that a union also allows


def test_load_run_lists_auto_among_methods_of_activation_checkpointing(tmp_path):
    path = write_run_file(tmp_path, '[layout]\nactivation_checkpointing = "some"')
    with pytest.raises(UserError, match="must be 'auto', 'none', 'norms', 'selective', 'full' or 'offload'"):
        load_run(path, [], {})


def test_load_run_reports_all_invalid_settings_together(tmp_path):
    with pytest.raises(UserError) as error:
        load_run(write_run_file(tmp_path, "[training]\nsteps = 0\nseed = -1"), environment={})
    assert "training.steps" in str(error.value)
    assert "training.seed" in str(error.value)


@pytest.mark.parametrize(("text", "problem"), [("[training", "is not valid TOML"), (None, "does not exist")])
def test_load_run_rejects_missing_or_malformed_file(tmp_path, text, problem):
    path = tmp_path / "run.toml" if text is None else write_run_file(tmp_path, text)
    with pytest.raises(UserError, match=problem):
        load_run(path, environment={})


def test_load_run_applies_defaults_file_environment_overrides_in_order(tmp_path):
    path = write_run_file(tmp_path, "[training]\nsteps = 2000\nseed = 2\nseq_len = 128\n[model]\nnum_layers = 4")
    environment = {"PHALANX_TRAINING__STEPS": "3000", "PHALANX_TRAINING__SEED": "3", "PHALANX_HOME": "/x"}
    run = load_run(path, ["training.steps=4000", "name=trial", "model.qk_norm=none"], environment)
    training = run.training
    assert (training.max_nonfinite_steps, training.seq_len, training.seed, training.steps) == (5, 128, 3, 4000)
    assert (run.name, run.model.num_layers, run.model.hidden_size, run.model.qk_norm) == ("trial", 4, 192, "none")


def test_load_run_resets_field_to_default_for_empty_override(tmp_path):
    path = write_run_file(tmp_path, '[layout]\ndata_parallel = "hsdp"\ndp_shard = 2')
    assert load_run(path, ["layout.dp_shard="], {}).layout.dp_shard is None


def test_load_run_reads_hugging_face_config_without_tokenizer(tmp_path):
    fields = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = {"model_type": "llama", "max_position_embeddings": 64, **dict.fromkeys(fields, 8), "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run_file = write_run_file(tmp_path, f'[model]\nfrom_hf = "{tmp_path}"')
    for path in (tmp_path / "config.json", run_file):
        run = load_run(path, ["training.steps=9"])
        assert (run.model.vocab_size, run.training.steps, run.data.tokenizer) == (8, 9, "bpe")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load_run(tmp_path / "config.json").data.tokenizer == str(tmp_path / "tokenizer.json")


LLAMA_CONFIG = {"model_type": "llama", "max_position_embeddings": 131_072}


def test_run_of_a_model_has_the_batch_of_published_runs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    for model, seq_len in (
        ("llama3-8b", 8192),
        ("olmoe-1b-7b", 4096),
        (tmp_path, 8192),
        (tmp_path / "config.json", 8192),
    ):
        training = load_run(model, environment={}).training
        assert (training.seq_len, training.tokens_per_step, training.precision) == (seq_len, 2**22, "bf16")
        assert not {"seq_len", "tokens_per_step"} & training.model_fields_set
    assert load_run("llama3-8b", environment={}).model == load_model_spec("llama3-8b")
    (tmp_path / "model.safetensors").touch()
    assert load_run(tmp_path, environment={}).model == load_model_spec(str(tmp_path))


def test_run_of_a_config_starts_from_its_weights_only_if_there_are_any(tmp_path):
    folder = tmp_path / "my llama"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(LLAMA_CONFIG))
    for path in (folder, config):
        run = load_run(path, environment={})
        assert (run.model.from_hf, run.model.hidden_size, run.optimizer.learning_rate) == (None, 4096, 3e-4)
        assert run.name == "my-llama"
    (folder / "model-00001-of-00002.safetensors").touch()
    for path in (folder, config):
        run = load_run(path, environment={})
        assert (run.model.from_hf, run.optimizer.learning_rate) == (str(folder), 2e-5)
    assert load_run("llama3-8b", environment={}).name == "llama3-8b"
    assert load_run("llama3-8b", ["name=mine"], {}).name == "mine"


@pytest.mark.parametrize(
    ("setting", "batch"),
    [
        ("training.seq_len=131072", (131_072, 2**22)),
        ("training.seq_len=1500", (1500, 1500 * 2048)),
        ("training.seq_len=8388608", (8_388_608, 8_388_608)),
        ("training.tokens_per_step=65536", (8192, 65_536)),
        ("model.max_seq_len=512", (512, 2**22)),
    ],
)
def test_run_of_a_model_fits_its_batch_to_the_settings(setting, batch):
    training = load_run("llama3-8b", [setting], {}).training
    assert (training.seq_len, training.tokens_per_step) == batch
    assert ("seq_len" in training.model_fields_set) == setting.startswith("training.seq_len")


@pytest.mark.parametrize(
    ("setting", "field"),
    [("training=5", "training = 5"), ("training.seq_len=x", "training.seq_len"), ("model.num_layers=0", "num_layers")],
)
def test_run_of_a_model_reports_invalid_settings(setting, field):
    with pytest.raises(UserError, match=field):
        load_run("llama3-8b", [setting], {})


def test_file_with_the_name_of_a_preset_is_the_run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3-8b").write_text('name = "mine"')
    (tmp_path / "tiny").mkdir()
    assert load_run("llama3-8b", environment={}).name == "mine"
    assert load_run("tiny", environment={}).model.preset == "tiny"
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / "tiny" / "model.safetensors").touch()
    assert load_run("tiny", environment={}).model.from_hf == "tiny"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("lama3-8b", "did you mean 'llama3-8b'"),
        ("llama3", "did you mean 'llama3-405b' or 'llama3-70b' or 'llama3-8b'"),
        ("nothing", "name one of command-r7b, .*phalanx init run.toml"),
    ],
)
def test_load_run_suggests_models_for_a_name_that_is_no_file(tmp_path, monkeypatch, name, fix):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"is neither a file nor the name of a model\n  fix: {fix}"):
        load_run(name, environment={})
    with pytest.raises(UserError, match=fix):
        load_model_spec(name)


def test_load_run_suggests_a_preset_for_a_name_that_the_hub_cannot_provide():
    for load in (lambda name: load_run(name, environment={}), load_model_spec):
        with pytest.raises(UserError, match="HF_HUB_OFFLINE is set\n  fix: did you mean 'llama3-8b'"):
            load("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("name", ["llama3-8b", "config.json", "model"])
def test_require_run_file_refuses_a_model(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for file in ("config.json", "model/config.json", "run.toml"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match=f"is a model, not a run file\n  fix: write one with `phalanx plan {name} "):
        require_run_file(name)
    require_run_file("run.toml")


@pytest.mark.parametrize("source", ["texts", "link/../texts", "hf:dataset"])
def test_absolute_paths_of_run_mean_the_same_from_everywhere(tmp_path, monkeypatch, source):
    (tmp_path / "elsewhere" / "texts").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "texts")
    (tmp_path / "dataset").mkdir()
    monkeypatch.chdir(tmp_path)
    run = with_absolute_paths(run_from_table({"data": {"train": [source, "stdlib", "hf:org/set"]}}))
    kind, separator, path = source.rpartition(":")
    assert run.data.train == [f"{kind}{separator}{tmp_path}/{path}", "stdlib", "hf:org/set"]
    assert with_absolute_paths(run_from_table({"output_dir": "texts/../runs"})).output_dir == f"{tmp_path}/runs"


def test_load_run_drops_inapplicable_options_when_strategy_is_overridden(tmp_path):
    offloaded = (
        '[layout]\ndata_parallel = "zero3"\nreshard_after_forward = false\n'
        'offload = "nvme"\noffload_directory = "/x"\nmicro_batch_size = 2'
    )
    path = write_run_file(tmp_path, offloaded)
    ddp = load_run(path, ["layout.data_parallel=ddp"], {}).layout
    assert (ddp.reshard_after_forward, ddp.offload, ddp.offload_directory, ddp.micro_batch_size) == (
        True,
        "none",
        None,
        2,
    )
    without_offload = load_run(path, ["layout.offload=none"], {}).layout
    assert (without_offload.reshard_after_forward, without_offload.offload_directory) == (False, None)
    zero1 = load_run(path, ["layout.data_parallel=zero1"], {}).layout
    assert (zero1.reshard_after_forward, zero1.offload, zero1.offload_directory) == (True, "nvme", "/x")
    layout = load_run(path, ["layout.data_parallel=ddp", "layout.max_staleness=2"], {}).layout
    with pytest.raises(UserError, match=r"layout\.max_staleness = 2 cannot be combined"):
        check_inapplicable_options(layout)


@pytest.mark.parametrize(
    ("name", "right_name"),
    [("PHALANX_TRAINING_STEPS", "PHALANX_TRAINING__STEPS"), ("PHALANX_DATA_HELD_OUT", "PHALANX_DATA__HELD_OUT")],
)
def test_load_run_refuses_variable_that_lacks_an_underscore(tmp_path, name, right_name):
    path = write_run_file(tmp_path, '[model]\npreset = "tiny"')
    with pytest.raises(UserError, match=f"write {right_name}"):
        load_run(path, environment={name: "3"})
    load_run(path, environment={"PHALANX_LAUNCHER": "3", "PHALANX_RANK_LOGS": "x", "TRAINING_STEPS": "3"})


def test_load_run_names_environment_variable_of_invalid_setting(tmp_path):
    with pytest.raises(UserError, match=r"training\.stepz = 3 is not a known field \(set by PHALANX_TRAINING__STEPZ\)"):
        load_run(write_run_file(tmp_path, ""), [], {"PHALANX_TRAINING__STEPZ": "3"})


@pytest.mark.parametrize(
    ("text", "warmup"),
    [
        ("", 50),
        ("[training]\nsteps = 4", 2),
        ("[training]\nsteps = 1", 0),
        ("[training]\nsteps = 100", 50),
        ("[training]\nsteps = 60\n[optimizer]\nwarmup_steps = 40", 40),
    ],
)
def test_load_run_limits_default_warmup_to_half_of_training_steps(tmp_path, text, warmup):
    assert load_run(write_run_file(tmp_path, text), [], {}).optimizer.warmup_steps == warmup


@pytest.mark.parametrize("entry", ["data.source.1", "data.source[1]"])
def test_override_of_a_list_names_an_entry_by_its_number(tmp_path, entry):
    tables = (f'[[data.source]]\nname = "{name}"\npath = "{name}.txt"\nweight = 1\n' for name in "ab")
    file = write_run_file(tmp_path, "".join(tables))
    sources = load_run(file, [f"{entry}.path=c.txt", f"{entry}.weight=2"], {}).data.source
    assert [(source.path, source.weight) for source in sources] == [(["a.txt"], 1), (["c.txt"], 2)]
    assert len(load_run(file, [f"{entry}="], {}).data.source) == 1
    for name in ("data.source.2.path", "data.source.b.path"):
        with pytest.raises(UserError, match=r"in data.source, which is a list of 2\n  fix: number its"):
            load_run(file, [f"{name}=c.txt"], {})


@pytest.mark.parametrize("override", ["training.steps", "=5", "name.x.y=1"])
def test_load_run_rejects_malformed_override(tmp_path, override):
    with pytest.raises(UserError):
        load_run(write_run_file(tmp_path, 'name = "x"'), [override], {})


@pytest.mark.parametrize("preset", preset_names("models"))
def test_model_preset_loads_and_accepts_overrides(preset):
    spec = load_model_spec(preset)
    shared = {"num_shared_kv_layers": 1} if spec.num_shared_kv_layers else {}
    run = run_from_table({"model": {"preset": preset, "num_layers": 4, **shared}})
    assert run.model.num_layers == 4
    assert spec.head_dim * spec.num_heads > spec.hidden_size / 2


@pytest.mark.parametrize("preset", sorted({*preset_names("machines")} - {"cpu"}))
def test_machine_preset_loads_with_plausible_values_and_accepts_overrides(preset):
    cluster = run_from_table({"cluster": {"preset": preset, "nodes": 3}}).cluster
    assert cluster.nodes == 3
    assert 7e13 <= cluster.peak_flops < 3e15
    assert 16 * 2**30 <= cluster.memory_bytes <= 288 * 2**30
    assert 3e11 <= cluster.hbm_bytes_per_second <= 8e12
    assert cluster.link_bytes_per_second >= 31.5e9
    assert cluster.fast_link_domain is None or cluster.fast_link_domain > 1
    assert (cluster.device == "cuda") != preset.startswith("tpu")


def test_cluster_preset_accepts_machine_file(tmp_path):
    file = tmp_path / "here.toml"
    file.write_text('device = "cpu"\ncores = 4\nmemory_bytes = 8000\npeak_flops = 1e9\n')
    cluster = run_from_table({"cluster": {"preset": str(file), "nproc_per_node": 8, "peak_flops": 2e9}}).cluster
    assert (cluster.preset, cluster.cores, cluster.peak_flops) == (None, 4, 2e9)
    assert (cluster.ranks_per_core, cluster.rank_memory_bytes) == (2, 1000)


def test_machine_file_inherits_name_and_values_of_extended_preset(tmp_path):
    file = tmp_path / "ours.toml"
    file.write_text('preset = "h100"\nnetwork_bytes_per_second = 25e9\n')
    cluster = run_from_table({"cluster": {"preset": str(file)}}).cluster
    assert (cluster.preset, cluster.network_bytes_per_second) == ("h100", 25e9)
    assert cluster.peak_flops == load_machine("h100").peak_flops


@pytest.mark.parametrize("first", ["a100", "cpu"])
def test_load_run_machine_option_replaces_resolved_preset_of_run_file(tmp_path, first):
    run = run_from_table(
        {"cluster": {"preset": first, "nodes": 3, "price_per_device_hour": 2.0, "network_bytes_per_second": 9e9}}
    )
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    assert load_run(file, environment={}) == run
    cluster = load_run(file, environment={}, machine="h100").cluster
    assert cluster == load_machine("h100").model_copy(update={"nodes": 3, "price_per_device_hour": 2.0})


def test_load_run_machine_option_preserves_cluster_fields_without_preset(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[cluster]\nnetwork_bytes_per_second = 9e9\n")
    assert load_run(file, environment={}, machine="h100").cluster.network_bytes_per_second == 9e9


def test_model_preset_accepts_override_of_single_moe_field():
    moe = run_from_table({"model": {"preset": "mixtral-8x7b", "moe": {"top_k": 1}}}).model.moe
    assert (moe.top_k, moe.num_experts) == (1, 8)


def test_model_spec_replace_validates_new_values():
    spec = load_model_spec("tiny")
    assert spec.replace(num_heads=6, head_dim=32).head_dim == 32
    with pytest.raises(UserError, match="num_kv_heads = 4 does not divide"):
        spec.replace(num_heads=6, num_kv_heads=4)


@pytest.mark.parametrize(
    ("world_size", "micro_batch", "batch_plan"), [(1, None, (1, 64, 1)), (2, 8, (2, 8, 4)), (4, None, (4, 16, 1))]
)
def test_plan_batch_splits_step_over_ranks(world_size, micro_batch, batch_plan):
    layout = {} if micro_batch is None else {"micro_batch_size": micro_batch}
    computed = ResolvedRun(run_from_table({"layout": layout}), world_size).batch
    assert (computed.dp_size, computed.micro_batch_size, computed.gradient_accumulation_steps) == batch_plan
    assert (
        computed.global_batch_size
        == computed.dp_size * computed.micro_batch_size * computed.gradient_accumulation_steps
    )


@pytest.mark.parametrize(
    ("vocab", "sequence", "micro_batch"),
    [(2048, 256, 64), (32_768, 256, 64), (65_536, 256, 32), (128_256, 1024, 4), (128_256, 8192, 1), (257, 32_768, 1)],
)
def test_plan_batch_limits_default_micro_batch_by_tokens_and_logit_bytes(vocab, sequence, micro_batch):
    """A custom loss needs all logits."""
    training = {"seq_len": sequence, "tokens_per_step": 128 * sequence, "loss": "my_loss:smoothed"}
    run = run_from_table({"model": {"vocab_size": vocab}, "training": training})
    assert ResolvedRun(run, 1).batch.micro_batch_size == micro_batch
    assert micro_batch == 1 or micro_batch * sequence <= 16_384
    assert micro_batch == 1 or micro_batch * sequence * vocab * 4 <= 2**31


@pytest.mark.parametrize(
    ("vocab", "sequence", "micro_batch"), [(2048, 256, 64), (128_256, 1024, 8), (128_256, 8192, 1), (257, 16_384, 1)]
)
def test_default_micro_batch_may_have_twice_the_tokens_if_loss_is_in_chunks(vocab, sequence, micro_batch):
    training = {"seq_len": sequence, "tokens_per_step": 128 * sequence}
    run = run_from_table({"model": {"vocab_size": vocab}, "training": training})
    assert ResolvedRun(run, 1).batch.micro_batch_size == micro_batch


def test_plan_batch_rejects_indivisible_step_and_suggests_valid_size():
    with pytest.raises(UserError, match=r"use training\.tokens_per_step = 16128"):
        _ = ResolvedRun(run_from_table({"layout": {"data_parallel": "zero3"}}), 3).batch


def test_plan_batch_allows_uneven_batches_for_ddp():
    batch_plan = ResolvedRun(run_from_table({}), 3).batch
    assert (
        batch_plan.global_batch_size,
        batch_plan.dp_size,
        batch_plan.micro_batch_size,
        batch_plan.gradient_accumulation_steps,
    ) == (
        64,
        3,
        22,
        1,
    )
    with pytest.raises(UserError, match="100 data-parallel ranks cannot divide"):
        _ = ResolvedRun(run_from_table({}), 100).batch


@pytest.mark.parametrize(
    ("scaling", "ranks", "sequences", "learning_rate"),
    [("keep", 4, 64, 1.0), ("linear", 4, 128, 2.0), ("linear", 1, 32, 0.5), ("sqrt", 8, 256, 2.0)],
)
def test_plan_batch_applies_batch_scaling_rule_to_other_rank_counts(scaling, ranks, sequences, learning_rate):
    """Tokens per update are those of 2 ranks with 64 sequences."""
    base = {} if scaling == "keep" else {"base_dp_size": 2}
    run = run_from_table({"training": {"batch_scaling": scaling, **base}, "layout": {"micro_batch_size": 4}})
    batch_plan = ResolvedRun(run, ranks).batch
    assert (batch_plan.global_batch_size, batch_plan.learning_rate_scale) == (sequences, learning_rate)
    assert (
        batch_plan.global_batch_size
        == batch_plan.micro_batch_size * batch_plan.dp_size * batch_plan.gradient_accumulation_steps
    )


def test_hf_config_is_read_when_run_file_gives_the_required_shape(tmp_path):
    config = {"model_type": "llama", "rope_theta": 5e5, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    config |= {"num_attention_heads": 2, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = {"vocab_size": 9, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "ffn_hidden_size": 8, "max_seq_len": 8}
    table = resolve_model({"from_hf": str(tmp_path), **shape})
    assert (table["rope"]["theta"], table["norm_eps"], table["tie_embeddings"]) == (5e5, 1e-6, True)
    resolved = parse_table(ModelSpec, table).model_dump(mode="json", exclude_none=True)
    (tmp_path / "config.json").unlink()  # a run directory no longer needs the file
    assert resolve_model(resolved) == resolved


def test_set_takes_whole_numbers_with_exponents(tmp_path):
    path = write_run_file(tmp_path, "")
    run = load_run(
        path, ["cluster.memory_bytes=32e9", "training.steps=1e3", "cluster.network_bytes_per_second=2.5e9"], {}
    )
    assert (run.cluster.memory_bytes, run.training.steps) == (32_000_000_000, 1000)
    assert run.cluster.network_bytes_per_second == 2.5e9


def test_load_run_reads_and_writes_automatic_activation_checkpointing(tmp_path):
    text = '[model]\npreset = "tiny"\n[layout]\nactivation_checkpointing = "auto"\n'
    run = load_run(write_run_file(tmp_path, text), [], {})
    assert (run.layout.auto_checkpointing, run.layout.activation_checkpointing) == (True, "none")
    assert load_run(write_run_file(tmp_path, to_toml(run)), [], {}) == run
    overridden = load_run(write_run_file(tmp_path, text), ["layout.activation_checkpointing=selective"], {})
    assert (overridden.layout.auto_checkpointing, overridden.layout.activation_checkpointing) == (False, "selective")


@pytest.mark.parametrize("method", ["none", "auto"])
def test_load_run_drops_recomputed_blocks_if_an_override_changes_the_method(tmp_path, method):
    layout = '[layout]\nactivation_checkpointing = "full"\npp = 2\nrecomputed_blocks = [2, 1]\n'
    path = write_run_file(tmp_path, f'[model]\npreset = "tiny"\n{layout}')
    assert load_run(path, [], {}).layout.recomputed_blocks == (2, 1)
    assert load_run(path, [f"layout.activation_checkpointing={method}"], {}).layout.recomputed_blocks is None
    assert load_run(path, ["layout.activation_checkpointing=selective"], {}).layout.recomputed_blocks == (2, 1)


DAMAGED_TOML = {
    "deep lists": (f"x = {'[' * 3000}{']' * 3000}", "nested more than 100 deep"),
    "lists deeper than a run": (f"x = {'[' * 150}{']' * 150}", "nested more than 100 deep"),
    "deep tables": (f"[{'a.' * 3000}a]", "nested more than 100 deep"),
    "a large integer": (f"x = {'9' * 400}", "an integer has more than 64 bits"),
    "an integer of thousands of digits": (f"x = {'9' * 5000}", "not valid TOML"),
    "an escape sequence": (r'name = "\u001b[2J"', r"contains control characters"),
    "an escape sequence in a key": (r'"\u001b[2J" = 1', r"contains control characters"),
}


@pytest.mark.parametrize("damage", DAMAGED_TOML)
def test_load_run_rejects_toml_that_is_too_deep_or_too_large(damage, tmp_path):
    text, problem = DAMAGED_TOML[damage]
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError, match=problem) as raised:
        load_run(tmp_path / "run.toml", environment={})
    assert "\x1b" not in str(raised.value)


@pytest.mark.parametrize("value", ["[" * 3000 + "]" * 3000, "9" * 400, "[" * 3000])
def test_load_run_rejects_override_that_is_too_deep_or_too_large(value, tmp_path):
    with pytest.raises(UserError, match=r"training\.steps"):
        load_run(write_run_file(tmp_path, ""), [f"training.steps={value}"], {})


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a": "\\ud800"}', b"\xff", b"[]1", b"[1]"])
def test_load_model_spec_rejects_damaged_json(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match="is not valid JSON"):
        load_model_spec(str(tmp_path / "config.json"))
