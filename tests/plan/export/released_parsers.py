"""Exports, read by the parsers of the trainers' releases: `make test-exports`, in a separate environment.

torchtitan reads a module, and builds the model without memory. DeepSpeed and Automodel read a file. Megatron-LM's
parser reads every flag, and its checks run up to the first that needs a GPU. The released nanotron cannot be
imported, because its config and its logging import each other. Therefore, its config package runs from its source,
without imports from nanotron, and with the imported definitions executed separately."""

from __future__ import annotations
import __future__

import ast
import json
import shlex
import sys
import typing
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typing_extensions
import yaml

from phalanx.cost.exact.parameters import count_parameters
from phalanx.plan.export.automodel import DEGREES
from phalanx.plan.export.common import RELEASES, Trainer
from phalanx.plan.export.export import export
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.parameter_shapes import has_weight_decay
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from tests.plan.export.test_export import EXPORT_CASES, HF_LATENT, QWEN, SMALL, WORLD_SIZE, make_run

MEGATRON_DIR = Path(sys.prefix) / "megatron"
LLAMA_405B = make_run({"preset": "llama3-405b"}, data_parallel="zero3")


def cases(trainer: Trainer) -> list[RunSpec]:
    return [run for name, run in EXPORT_CASES if name == trainer]


@pytest.mark.parametrize("trainer", RELEASES)
def test_installed_version_is_the_one_exports_name(trainer: Trainer) -> None:
    name, named_version = RELEASES[trainer].split()
    if trainer == "megatron":
        assert (MEGATRON_DIR / f"megatron_core-{named_version}.dist-info").is_dir()
    else:
        assert version(name) == named_version


@pytest.mark.parametrize("run", cases("torchtitan"))
def test_torchtitan_reads_export_and_builds_model(run: RunSpec, tmp_path: Path, monkeypatch: Any) -> None:
    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    config = load_torchtitan(run, tmp_path, monkeypatch, ConfigManager())
    dims = ParallelDims.from_config(config.parallelism, WORLD_SIZE)
    sizes = parallel_dims(run.layout, WORLD_SIZE)
    assert (dims.dp_replicate, dims.dp_shard, dims.cp) == (sizes.dp_replicate, sizes.dp_shard, sizes.cp)
    assert (dims.tp, dims.pp, dims.ep) == (sizes.tp, sizes.pp, sizes.ep)
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    with torch.device("meta"):
        model = model_config.build()
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == count_parameters(run.model).total
    assert {name for name, value in parameters.items() if value.ndim < 2} == {
        name for name in parameters if "norm" in name
    }
    modules = dict(model.named_modules())
    assert all(name in modules for part in config.parallelism.module_fqns_per_model_part or [] for name in part)


def test_torchtitan_model_of_llama3_405b_is_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import model_registry

    exported = load_torchtitan(LLAMA_405B, tmp_path, monkeypatch, ConfigManager()).model_spec.model
    released = model_registry("405B").model
    assert exported.layers[0].attention.rope == released.layers[0].attention.rope
    assert len(exported.layers) == len(released.layers)
    for part in ("w1", "w2", "w3"):
        sizes, released_sizes = (getattr(model.layers[0].feed_forward, part) for model in (exported, released))
        assert (sizes.in_features, sizes.out_features) == (released_sizes.in_features, released_sizes.out_features)


LOGITS_CASES = {
    "llama3": {**SMALL, "rope": {"scaling": "llama3", "factor": 8.0, "original_context": 64}},
    "wide-heads": {**SMALL, "head_dim": 64, "norm_eps": 1e-3},
    "tied": {**SMALL, "tie_embeddings": True},
    "qwen3": QWEN,
    "deepseek": {**HF_LATENT, "num_layers": 1, "moe": {**HF_LATENT["moe"], "num_groups": 4, "top_groups": 2}},
    "deepseek without latent queries": {
        **HF_LATENT,
        "num_layers": 1,
        "mixer": {**HF_LATENT["mixer"], "query_rank": None},
        "moe": None,
    },
    "experts": {**QWEN, "num_layers": 1, "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 128}},
}


@pytest.mark.parametrize("name", LOGITS_CASES)
def test_torchtitan_has_the_logits_of_phalanx(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    import torch
    from safetensors.torch import load_file
    from torchtitan.config import ConfigManager

    from phalanx.model.huggingface.export import export_hf
    from phalanx.model.transformer import Transformer

    run = make_run(LOGITS_CASES[name], data_parallel="zero3")
    torch.manual_seed(0)
    model = Transformer(run.model)
    for parameter in model.parameters():
        is_norm = parameter.ndim == 1
        torch.nn.init.normal_(parameter, is_norm, 0.3 if is_norm else 2 / parameter.shape[-1] ** 0.5)
    for bias in model.buffers():
        torch.nn.init.normal_(bias, 0, 0.1)
    export_hf(run.model, {**dict(model.named_parameters()), **dict(model.named_buffers())}, tmp_path / "hf")
    spec = load_torchtitan(run, tmp_path, monkeypatch, ConfigManager()).model_spec
    torchtitan_model = spec.model.build()
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    torchtitan_model.load_state_dict(spec.state_dict_adapter(spec.model, str(tmp_path / "hf")).from_hf(weights))
    tokens = torch.randint(run.model.vocab_size, (2, 256))
    positions = torch.arange(256).expand(2, 256)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        masks = torchtitan_model.get_attention_masks(positions)
        logits, *_ = model(tokens)
        difference = logits - torchtitan_model(tokens, positions=positions, attention_masks=masks)
    # Logits have a standard deviation near 2; torchtitan's experts compute in bf16.
    assert difference.abs().max() < (0.1 if run.model.moe else 2e-3)


def load_torchtitan(run: RunSpec, folder: Path, monkeypatch: Any, manager: Any) -> Any:
    """Return torchtitan's configuration after its command line has named the export."""
    (folder / "phalanx_run.py").write_text(export(ResolvedRun(run, WORLD_SIZE), "torchtitan").text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "phalanx_run", raising=False)
    return manager.parse_args(["--module", "phalanx_run", "--config", "run", "--dataloader.dataset", "c4"])


@pytest.mark.parametrize("run", cases("megatron"))
def test_megatron_parses_export(run: RunSpec, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(MEGATRON_DIR)
    if sys.version_info < (3, 12):
        # The only feature of Python 3.12 that importing the package needs.
        monkeypatch.setattr(typing, "override", typing_extensions.override, raising=False)
    from megatron.training.arguments import parse_args, validate_args

    script_words = shlex.split(
        export(ResolvedRun(run, WORLD_SIZE), "megatron").text.replace("\\\n", " "), comments=True
    )
    start = script_words.index("pretrain_gpt.py")
    for argument in script_words[: script_words.index("torchrun")]:
        monkeypatch.setenv(*argument.split("="))
    monkeypatch.setenv("WORLD_SIZE", str(WORLD_SIZE))
    monkeypatch.setattr(sys, "argv", [*script_words[start:-1], "--mock-data", "--tokenizer-type", "NullTokenizer"])
    arguments = parse_args()
    assert arguments.context_parallel_size == run.layout.cp
    try:
        validate_args(arguments)
    except AssertionError as error:
        if "not compiled with CUDA" not in str(error):
            raise


class RecordingTable(dict[str, Any]):
    """Table that records the keys that were read."""

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__(table)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


@pytest.fixture
def deepspeed_ranks() -> Iterator[None]:
    """Replace the process group by one of which DeepSpeed can only read the size."""
    import deepspeed.comm
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    deepspeed.comm.init_distributed()
    yield
    deepspeed.comm.destroy_process_group()


@pytest.mark.parametrize("run", cases("automodel"))
def test_automodel_reads_export(run: RunSpec) -> None:
    """Its models need a GPU, those of transformers are of the same config.json."""
    import torch
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from nemo_automodel.recipes._typed_config import RecipeConfig
    from torch.distributed.pipelining.schedules import get_schedule_class
    from transformers import AutoModelForCausalLM

    table = yaml.safe_load(export(ResolvedRun(run, WORLD_SIZE), "automodel").text)
    # Its import makes kernels that Triton 3.9 refuses.
    assert table["model"].pop("_target_") == "nemo_automodel.NeMoAutoModelForCausalLM.from_config"
    recipe = RecipeConfig(ConfigNode(table))
    setup, sizes = parse_distributed_section(recipe.distributed.to_dict()), parallel_dims(run.layout, WORLD_SIZE)
    assert (setup["tp_size"], setup["pp_size"], setup["ep_size"]) == (sizes.tp, sizes.pp, sizes.ep)
    assert (setup["dp_replicate_size"] or WORLD_SIZE) == sizes.dp_replicate
    scheduler = recipe.step_scheduler.build(None, sizes.dp_size, recipe.get("step_scheduler.local_batch_size"))
    assert recipe.step_scheduler.global_batch_size * run.training.seq_len == run.training.tokens_per_step
    assert recipe.loss_fn
    assert recipe.dataloader.dataset_config.seq_len == run.training.seq_len
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(recipe.model.config.instantiate())
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    assert sum(parameter.numel() for parameter in parameters.values()) == count_parameters(run.model).total
    (optimizer,) = recipe.optimizer.build(model)
    undecayed = {
        id(value) for group in optimizer.param_groups if group.get("wd_mult") == 0 for value in group["params"]
    }
    assert undecayed == {id(value) for name, value in parameters.items() if not has_weight_decay(name, value.shape)}
    recipe.lr_scheduler.build(optimizer, scheduler)
    if pipeline := setup["pipeline_config"]:
        assert get_schedule_class(pipeline.pp_schedule)
        assert all(name in modules for stage in pipeline.module_fqns_per_model_part for name in stage)


def test_automodel_declares_the_degrees_that_exports_use() -> None:
    from nemo_automodel._transformers.model_capabilities import query_capabilities
    from nemo_automodel._transformers.registry import ModelRegistry
    from transformers import NemotronHConfig

    for architecture, degrees in DEGREES.items():
        model_class = ModelRegistry.get_model_cls_from_model_arch(architecture)
        is_hybrid = architecture == "NemotronHForCausalLM"
        declared = query_capabilities(NemotronHConfig(architectures=[architecture]) if is_hybrid else model_class)
        assert degrees == tuple(name for name in ("tp", "pp", "ep") if getattr(declared, f"supports_{name}"))


@pytest.mark.usefixtures("deepspeed_ranks")
@pytest.mark.parametrize("run", cases("deepspeed"))
def test_deepspeed_reads_every_key_of_export(run: RunSpec) -> None:
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DeepSpeedConfig

    class ModelRanks:
        """Topology of ranks that a program's pipeline or AutoTP passes to DeepSpeed."""

        @staticmethod
        def get_data_parallel_world_size() -> int:
            return WORLD_SIZE // (run.layout.tp * run.layout.pp)

    table = RecordingTable(json.loads(export(ResolvedRun(run, WORLD_SIZE), "deepspeed").text))
    config = DeepSpeedConfig(table, mpu=ModelRanks if run.layout.tp * run.layout.pp > 1 else None)
    assert table.keys() - table.read == {"_comment"}
    assert config.zero_optimization_stage == table["zero_optimization"]["stage"]
    optimizer = torch.optim.AdamW([torch.zeros(1)], **config.optimizer_params)
    assert getattr(lr_schedules, config.scheduler_name)(optimizer, **config.scheduler_params)


@pytest.mark.parametrize("run", cases("nanotron"))
def test_nanotron_reads_export(run: RunSpec) -> None:
    config = nanotron_config_package().get_config_from_dict(
        yaml.safe_load(export(ResolvedRun(run, WORLD_SIZE), "nanotron").text)
    )
    sizes = parallel_dims(run.layout, WORLD_SIZE)
    assert (config.parallelism.dp, config.parallelism.tp, config.parallelism.pp) == (sizes.dp_size, sizes.tp, sizes.pp)
    assert type(config.model.model_config).__name__ == "LlamaConfig"
    assert config.global_batch_size * run.training.seq_len == run.training.tokens_per_step


def nanotron_config_package() -> ModuleType:
    """Return the release's config package as one module."""
    package = find_spec("nanotron")
    assert package is not None
    assert package.origin is not None
    root = Path(package.origin).parent
    module = ModuleType("nanotron_config")
    sys.modules[module.__name__] = module
    execute(root / "parallel/tensor_parallel/enum.py", module)
    execute(root / "generation/sampler.py", module, "SamplerType")
    engines = ("PipelineEngine", "AllForwardAllBackwardPipelineEngine", "OneForwardOneBackwardPipelineEngine")
    execute(root / "parallel/pipeline_parallel/engine.py", module, *engines)
    for name in ("utils_config", "parallelism_config", "models_config", "lighteval_config", "config"):
        execute(root / f"config/{name}.py", module)
    return module


def execute(file: Path, module: ModuleType, *names: str) -> None:
    """Run the statements of a file in `module`, or only its imports and
    the named classes; skip imports from nanotron."""

    def is_needed(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return not getattr(statement, "module", "").startswith("nanotron")
        if isinstance(statement, ast.Assign) and ast.unparse(statement).startswith("logger ="):
            return False
        return not names or getattr(statement, "name", None) in names

    body = [statement for statement in ast.parse(file.read_text()).body if is_needed(statement)]
    flags = __future__.annotations.compiler_flag if names else 0
    exec(compile(ast.Module(body, []), file, "exec", flags), vars(module))
