"""Distillation equals a plain implementation with models of transformers in fp64; wrong teachers are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import phalanx
from phalanx.cost.exact.parameters import count_parameters
from phalanx.data.loader import prefetch
from phalanx.data.packing import IGNORE_INDEX
from phalanx.model.huggingface.export import checkpoint_form, stored_pieces
from phalanx.model.huggingface.tensor_names import hf_sources
from phalanx.parallel.cross_entropy import LossScale
from phalanx.parallel.distillation_loss import TeacherHead
from phalanx.parallel.linear_cross_entropy import ChunkedLoss
from phalanx.plan.predicted_vs_measured import PARTS, WORKING, compare_with_prediction
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_model_spec, load_run
from phalanx.spec.files.teacher import keep_teacher, teacher_run, with_kept_teacher
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.create_run import create_run
from tests.helpers.cli_runner import command_json
from tests.helpers.small_runs import (
    DENSE,
    Table,
    find_examples,
    make_trainer,
    measure_steady_step,
    small_run,
    train_until,
)
from tests.model.huggingface.test_checkpoint_traps import EAGER, fp32_as_fp64, fp64_by_default
from tests.parity.test_distillation import make_teacher

SIZES: Table = {"vocab_size": 257, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
STUDENT: Table = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEACHER: Table = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEMPERATURE = 2.5
WEIGHT = 0.7


def plain_loss(x: Tensor, y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of all tokens and its divergence, as in Hinton et al., section 2."""
    x, y = x.flatten(0, 1), y.flatten(0, 1)
    cross_entropy = F.cross_entropy(x, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    probabilities, student = (F.log_softmax(logits / TEMPERATURE, dim=1) for logits in (y, x))
    counted = (targets.flatten() != IGNORE_INDEX)[:, None]
    divergence = (F.kl_div(student, probabilities, reduction="none", log_target=True) * counted).sum()
    return (1 - WEIGHT) * cross_entropy + WEIGHT * TEMPERATURE**2 * divergence, divergence


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("columns", [11, 2**25], ids=["one chunk", "chunks"])
def test_loss_and_gradients_are_those_of_plain_pytorch(columns: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, taught, matrix = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((2, 5, 6), (11, 6), (2, 5, 4), (11, 4))
    )
    targets = torch.randint(0, 11, (2, 5), generator=generator)
    targets[1, 2:] = IGNORE_INDEX
    cap = (lambda z: z) if softcap is None else lambda z: softcap * torch.tanh(z / softcap)
    expected, divergence = plain_loss(cap(x @ weight.T), cap(taught @ matrix.T).detach(), targets)
    gradients = torch.autograd.grad(expected, (x, weight))
    head = TeacherHead(
        x=taught.detach(), weight=matrix.detach(), softcap=softcap, temperature=TEMPERATURE, share=WEIGHT
    )
    chunked = ChunkedLoss(columns=columns, itemsize=8, scale=LossScale(3.0), softcap=softcap)
    assert (chunked.chunks(targets) is None) == (columns == 11)
    function = chunked(targets, IGNORE_INDEX, None, head)
    assert function is not None
    loss = function(x, weight)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert sum(head.divergences).item() == pytest.approx(divergence.item(), rel=1e-12)
    for mine, theirs in zip(torch.autograd.grad(loss, (x, weight)), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.fixture(scope="module")
def hf_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """A student and a teacher of transformers in fp64, and their directories."""
    folder = tmp_path_factory.mktemp("hf")
    models = {}
    for name, kind, sizes in (
        ("student", transformers.LlamaConfig, STUDENT),
        ("teacher", transformers.Qwen3Config, TEACHER),
    ):
        torch.manual_seed(len(name))
        with fp64_by_default(), fp32_as_fp64():
            config = kind(**SIZES, **sizes, num_key_value_heads=2, head_dim=8)
            model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).double().eval()
        model.save_pretrained(folder / name)
        models[name] = model, folder / name
    return models


def distilled_run(documents: Path, out: Path, models: dict[str, tuple[Any, Path]], **layout: Any) -> RunSpec:
    changes = {
        "model": {"from_hf": str(models["student"][1])},
        "distillation": {"teacher": str(models["teacher"][1]), "temperature": TEMPERATURE, "weight": WEIGHT},
        "data.mask_documents": False,
        "training.steps": 1,
    }
    return small_run(documents, out, {**changes, **{f"layout.{name}": value for name, value in layout.items()}})


def test_loss_and_gradients_equal_those_of_transformers(
    documents: Path, tmp_path: Path, hf_models: dict[str, tuple[Any, Path]]
) -> None:
    run = distilled_run(documents, tmp_path, hf_models)
    trainer = make_trainer(run)
    (micro,) = trainer.micro_batches(next(prefetch(trainer.loader, 0, 1)))
    sums = trainer.forward_backward([micro])
    with fp32_as_fp64():
        student, teacher = (hf_models[name][0] for name in ("student", "teacher"))
        expected, divergence = plain_loss(
            student(micro.tokens).logits, teacher(micro.tokens).logits.detach(), micro.targets
        )
    student.zero_grad()
    expected.backward()
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-10)
    assert sums.divergences.item() == pytest.approx(divergence.item(), rel=1e-10)
    form = checkpoint_form(run.model)
    for name, source in hf_sources(form.family, form.spec).items():
        mine = torch.cat(list(stored_pieces(source, trainer.strategy.gradients())))
        torch.testing.assert_close(mine, student.get_parameter(name).grad, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"data_parallel": "zero3"}, {"pp": 2, "micro_batch_size": 2}, {"cp": 2}],
    ids=["tp", "zero3", "pp", "cp"],
)
def test_layout_trains_as_transformers(
    layout: Table, documents: Path, tmp_path: Path, hf_models: dict[str, tuple[Any, Path]]
) -> None:
    run = distilled_run(documents, tmp_path, hf_models, **layout)
    results = rank_pool(2).run(first_step, run)
    trainer = make_trainer(distilled_run(documents, tmp_path, hf_models))
    (micro,) = trainer.micro_batches(next(prefetch(trainer.loader, 0, 1)))
    with fp32_as_fp64():
        student, teacher = (hf_models[name][0] for name in ("student", "teacher"))
        loss, divergence = plain_loss(
            student(micro.tokens).logits, teacher(micro.tokens).logits.detach(), micro.targets
        )
    student.zero_grad()
    loss.backward()
    count = int((micro.targets != IGNORE_INDEX).sum())
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in student.parameters()])
    expected = {"loss": loss.item() / count, "kl_loss": divergence.item() / count, "grad_norm": norm.item() / count}
    for result in results:
        assert result == pytest.approx(expected, rel=1e-10)


def first_step(run: RunSpec) -> Table:
    """Return loss, divergence and gradient norm of the first step."""
    trainer = make_trainer(run)
    record = trainer.train_step(prefetch(trainer.loader, 0, 1))
    return {name: record[name] for name in ("loss", "kl_loss", "grad_norm")}


def numbered_run(documents: Path, out: Path, teacher: Path, **changes: Any) -> RunSpec:
    table = {"model": DENSE, "distillation": {"teacher": str(teacher)}, **changes}
    return small_run(documents, out, table)


@pytest.fixture(scope="module")
def teacher(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a teacher."""
    return make_teacher(documents, tmp_path_factory.mktemp("teacher"), "teacher", {**DENSE, "num_heads": 8})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation": {"teacher": "nowhere"}}, "'nowhere' is neither a run directory nor a directory of a Hugging"),
        ({"model": {**DENSE, "vocab_size": 300}}, r"has a vocabulary of 257, but model\.vocab_size is 300"),
        (
            {"layout.pp": 4, "model": {**DENSE, "num_layers": 4}},
            r"cannot run in this layout: layout\.pp = 4 results in",
        ),
        ({"training.loss": "own_parts:smoothed"}, r"training\.loss cannot be combined with \[distillation\]"),
        ({"model": {**DENSE, "mtp": {"layers": 1}}}, r"model\.mtp cannot be combined with \[distillation\]"),
        ({"layout.data_parallel": "parameter_server"}, r"layout\.data_parallel cannot be combined with \[distillation"),
        ({"distillation.temperature": 0}, r"distillation\.temperature = 0 .*greater than 0"),
        ({"distillation.weight": 1.5}, r"distillation\.weight = 1\.5 .*less than or equal to 1"),
    ],
    ids=str,
)
def test_invalid_runs_are_refused(changes: Table, message: str, documents: Path, teacher: Path, tmp_path: Path) -> None:
    find_examples()
    with pytest.raises(UserError, match=message):
        create_run(numbered_run(documents, tmp_path, teacher, **changes), 4, resume=False)
    assert not (tmp_path / "parity").exists()


def without_checkpoint(teacher: Path) -> str:
    shutil.rmtree(teacher / "checkpoints")
    return "has no usable weights"


def with_another_tokenizer(teacher: Path) -> str:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")])).save(str(teacher / "tokenizer.json"))
    return "has another tokenizer than the run"


def with_damaged_tokenizer(teacher: Path) -> str:
    (teacher / "tokenizer.json").write_text("{")
    return "has an unusable tokenizer"


def with_adapters(teacher: Path) -> str:
    with open(teacher / "run.toml", "a") as file:
        file.write("\n[adapter]\nrank = 2\nalpha = 2.0\n")
    return "has adapters"


@pytest.mark.parametrize("change", [without_checkpoint, with_another_tokenizer, with_damaged_tokenizer, with_adapters])
def test_wrong_teachers_are_refused(change: Any, documents: Path, teacher: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(teacher, tmp_path / "changed"))
    message = change(changed)
    with pytest.raises(UserError, match=rf"distillation\.teacher = .*{message}"):
        create_run(numbered_run(documents, tmp_path, changed), 1, resume=False)


def test_predictions_of_a_finished_student_do_not_need_its_teacher(
    documents: Path, teacher: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(teacher, tmp_path / "teacher"))
    run = numbered_run(documents, tmp_path, moved, **{"training.steps": 4})
    directory = phalanx.train_run(run, nproc=1, quiet=True).run_dir
    before = command_json("report", directory)["runs"][0]
    assert before["comparison"]
    shutil.rmtree(moved)
    assert command_json("report", directory)["runs"][0] == before


def test_description_of_a_teacher_of_hugging_face_is_kept(
    documents: Path, tmp_path: Path, hf_models: dict[str, tuple[Any, Path]]
) -> None:
    moved = Path(shutil.copytree(hf_models["teacher"][1], tmp_path / "teacher"))
    run = numbered_run(documents, tmp_path, moved)
    expected = teacher_run(run)
    (tmp_path / "run").mkdir()
    keep_teacher(run, tmp_path / "run")
    shutil.rmtree(moved)
    kept = teacher_run(with_kept_teacher(run, tmp_path / "run"))
    assert expected is not None
    assert kept is not None
    assert kept.model == expected.model.model_copy(update={"from_hf": kept.model.from_hf})


def test_run_records_checkpoint_of_its_teacher_and_keeps_it(documents: Path, teacher: Path, tmp_path: Path) -> None:
    trained = Path(shutil.copytree(teacher, tmp_path / "teacher"))
    run = numbered_run(documents, tmp_path, trained)
    file = create_run(run, 1, resume=False) / "run.toml"
    assert load_run(file, environment={}).distillation.step == 0
    learner = make_trainer(load_run(trained / "run.toml", environment={}).replace(output_dir=str(tmp_path)))
    train_until(learner, 1)
    learner.save()
    learner.checkpointer.wait()
    create_run(run, 1, resume=True)
    assert load_run(file, environment={}).distillation.step == 0
    create_run(run.replace(name="later"), 1, resume=False)
    assert load_run(tmp_path / "later" / "run.toml", environment={}).distillation.step == 1
    shutil.rmtree(trained / "checkpoints" / "step-00000000")
    with pytest.raises(UserError, match=r"distillation\.step = 0 is not a checkpoint of (.|\n)*use one of 1"):
        create_run(run, 1, resume=True)


def test_step_of_a_teacher_without_checkpoints_is_refused(
    documents: Path, tmp_path: Path, hf_models: dict[str, tuple[Any, Path]]
) -> None:
    run = numbered_run(documents, tmp_path, hf_models["teacher"][1], **{"distillation.step": 3})
    with pytest.raises(UserError, match=r"distillation\.step = 3 has no effect"):
        create_run(run, 1, resume=False)


def test_teacher_without_tokenizer_is_refused(
    documents: Path, tmp_path: Path, hf_models: dict[str, tuple[Any, Path]]
) -> None:
    with pytest.raises(UserError, match=r"distillation\.teacher = .*has no tokenizer\.json"):
        create_run(numbered_run(documents, tmp_path, hf_models["teacher"][1]), 1, resume=False)


MEMORY_MODEL: Table = {**DENSE, "hidden_size": 64, "vocab_size": 1024, "num_layers": 4, "max_seq_len": 128}
MEMORY_TEACHER: Table = {**MEMORY_MODEL, "hidden_size": 96, "num_heads": 8, "num_kv_heads": 4, "num_layers": 6}
MEMORY_CASES: dict[str, tuple[int, str, Table]] = {
    "one": (1, "bf16", {}),
    "zero1": (2, "fp32", {"layout.data_parallel": "zero1"}),
    "zero3": (2, "bf16", {"layout.data_parallel": "zero3"}),
    "tp": (2, "bf16", {"layout.tp": 2}),
    "pp": (2, "fp32", {"layout.pp": 2, "layout.micro_batch_size": 1}),
    "cp": (2, "fp32", {"layout.cp": 2}),
}


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_planned_memory_is_allocated_and_planned_traffic_sent(case: str, documents: Path, tmp_path: Path) -> None:
    ranks, precision, layout = MEMORY_CASES[case]
    teacher = make_teacher(documents, tmp_path, "teacher", MEMORY_TEACHER)
    sizes = {"training.precision": precision, "training.seq_len": 128, "training.tokens_per_step": 1024}
    run = numbered_run(documents, tmp_path, teacher, **{"model": MEMORY_MODEL, **sizes, **layout})
    measured = [measure_steady_step(run)] if ranks == 1 else rank_pool(ranks).run(measure_steady_step, run)
    rows = list(compare_with_prediction(ResolvedRun(run, ranks), dict(enumerate(measured))))
    for row in rows:
        if row.quantity == "teacher":
            assert row.measured == row.predicted, row
        elif row.quantity == "total":
            assert row.measured == pytest.approx(row.predicted, rel=0.03), row
        elif row.quantity not in {*PARTS, *WORKING}:
            # Sums of losses and norms are not planned.
            assert row.measured == pytest.approx(row.predicted, rel=1e-6, abs=1024), row
    assert [row for row in rows if row.quantity == "teacher"]


def test_plan_adds_time_and_memory_of_teacher(documents: Path, teacher: Path, tmp_path: Path) -> None:
    machine = {"cluster": {"preset": "h100"}, "training.precision": "bf16"}
    taught = numbered_run(documents, tmp_path, teacher, **machine)
    alone = taught.replace(distillation=None)
    with_teacher, without = (phalanx.predict(run, 8, run.layout) for run in (taught, alone))
    assert with_teacher.step_seconds > without.step_seconds
    weights = count_parameters(load_model_spec(str(teacher / "run.toml"))).total
    assert with_teacher.stages["first"]["state"] - without.stages["first"]["state"] == 2 * weights
