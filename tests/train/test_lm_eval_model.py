"""Scores by lm-eval of a trained model equal those of transformers on its export, in every layout."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.api.trained_model import load_model
from phalanx.data.tokenizer import load_tokenizer
from phalanx.launch.process import init_distributed
from phalanx.model.generation import generate
from phalanx.runs.scores import read_scores
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.testing import rank_pool
from phalanx.testing.processes import run_python
from phalanx.train.checkpoint.load_model import find_trained_weights
from phalanx.train.create_run import create_run
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.small_runs import make_trainer, small_run, train_to_end

pytest.importorskip("lm_eval", reason="lm_eval is not installed: make test-lm-eval")
from phalanx.train.callbacks.task_scores import TaskScores
from phalanx.train.lm_eval_model import evaluate_tasks, model_in_ranks

CHOICE = """
task: words
dataset_path: json
dataset_kwargs: {{ data_files: {{ test: {data} }} }}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{ metric: acc }}, {{ metric: acc_norm }}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{ data_files: {{ test: {data} }} }}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}} is a text that is longer than the context of the model: {{{{text}}}}, {{{{text}}}}"
metric_list: [{{ metric: bits_per_byte }}]
"""
GENERATION = """
task: continued
dataset_path: json
dataset_kwargs: {{ data_files: {{ test: {data} }} }}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{ until: ["\\n"], max_gen_toks: 12 }}
metric_list: [{{ metric: exact_match }}]
"""
TASKS = {"words": CHOICE, "rolling": ROLLING, "continued": GENERATION}
WORDS = ["import", "def", "class", "return", "self", "for", "while", "lambda", "yield", "print", "json", "range"]
LAYOUTS = {
    "zero3": Layout(data_parallel="zero3"),
    "tp": Layout(tp=2),
    "pp": Layout(pp=2),
    "cp": Layout(cp=2, cp_method="ulysses"),
    "tp x pp": Layout(tp=2, pp=2),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a trained run."""
    changes = {"training.precision": "fp32", "training.steps": 12}
    run = small_run(Path(json.__file__).parent, tmp_path_factory.mktemp("trained"), changes)
    directory = create_run(run, 1, resume=False)
    train_to_end(make_trainer(run))
    return directory


@pytest.fixture(scope="module")
def tasks(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of tasks. Half of the texts to generate are those of the model itself."""
    folder = tmp_path_factory.mktemp("tasks")
    generator = random.Random(1)
    rows: list[dict[str, Any]] = []
    module, _ = load_model(trained)
    while (number := len(rows)) < 24:
        text = " ".join(generator.choices(WORDS, k=generator.randint(1, 5)))
        if not has_clear_continuation(module, text):
            continue
        options = ("--prompt", text, "--tokens", 12, "--temperature", 0)
        continued = command_output("generate", trained, *options)[len(text) :].split("\n")[0] if number % 2 else "other"
        choices = [f" {generator.choice(WORDS)}", f" {generator.choice(WORDS)}("]
        rows.append({"text": text, "choices": choices, "answer": generator.randint(0, 1), "target": continued})
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


def has_clear_continuation(module: torch.nn.Module, text: str) -> bool:
    """Return whether the rounding of a layout cannot change the most likely tokens after a text."""
    ids = torch.tensor(list(text.encode()))
    with torch.no_grad():
        first, second = module(generate(module, ids, 12, temperature=0)[None])[0][0, len(ids) - 1 :].topk(2).values.T
    return bool((first - second).min() > 1e-3)


def metrics_of(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {
        f"{task} {name}": value
        for task, values in results.items()
        for name, value in values.items()
        if name.endswith(",none") and "stderr" not in name
    }


@pytest.fixture(scope="module")
def expected(trained: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return the scores of transformers on the export."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("hf") / "model"
    command_output("export", trained, folder)
    results = simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder},dtype=float32,device=cpu",
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks)),
        bootstrap_iters=0,
    )
    assert results is not None
    scores = metrics_of(results["results"])
    assert 0.3 < scores["continued exact_match,none"] < 1
    assert 0 < scores["words acc,none"] < 1
    return scores


def scores_in_ranks(directory: Path, tasks: Path, layout: Layout) -> dict[str, float]:
    found = find_trained_weights(directory)
    device = init_distributed("cpu")
    model = model_in_ranks(found, load_tokenizer(found.tokenizer_file), layout, device, batch_size=4)
    return metrics_of(evaluate_tasks(model, list(TASKS), str(tasks), None, None, chat=False))


def test_scores_in_one_process_equal_transformers_and_are_reported(
    trained: Path, tasks: Path, expected: dict[str, float]
) -> None:
    names = ",".join(TASKS)
    printed = command_json("evaluate", trained, "--tasks", names, "--include-path", tasks)
    assert metrics_of(printed["tasks"]) == pytest.approx(expected, rel=1e-5)
    assert {score.task for score in read_scores(trained)} == set(TASKS)
    (report,) = command_json("report", trained)["runs"]
    scores = {f"{row['task']} {row['metric']},none": row["values"]["12"] for row in report["scores"]}
    assert scores == pytest.approx(expected, rel=1e-5)
    assert "exact_match" in command_output("report", trained)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_in_ranks_equal_transformers(
    layout: str, trained: Path, tasks: Path, expected: dict[str, float]
) -> None:
    # lm-eval gives the scores to the first rank only.
    ranks = 4 if layout == "tp x pp" else 2
    scores, *_ = rank_pool(ranks).run(scores_in_ranks, trained, tasks, LAYOUTS[layout])
    assert scores == pytest.approx(expected, rel=1e-5)


def test_command_starts_ranks(trained: Path, tasks: Path, expected: dict[str, float]) -> None:
    words = ["evaluate", str(trained), "--tasks", "words", "--include-path", str(tasks), "--json", "--nproc", "2"]
    done = run_python([sys.executable, "-m", "phalanx", *words, "--set", "layout.tp=2"], timeout=120, text=True)
    assert done.returncode == 0, done.stderr
    scores = metrics_of(json.loads(done.stdout.splitlines()[-1])["tasks"])
    assert scores == pytest.approx({name: expected[name] for name in scores}, rel=1e-5)


def train_with_scores(text: Path, out: Path, tasks: Path, layout: Layout) -> None:
    """Train a run that scores its model."""
    callback = TaskScores(list(TASKS), every=5, include_path=str(tasks), batch_size=4)
    run = small_run(text, out, {"training.precision": "fp32", "training.steps": 12, "layout": layout.model_dump()})
    trainer = make_trainer(run)
    trainer.directory.mkdir(parents=True, exist_ok=True)
    train_to_end(trainer, user_callbacks={"callbacks.scores": callback})


@pytest.mark.parametrize("layout", ["one process", "zero3", "tp x pp"])
def test_callback_scores_model_while_it_trains(
    layout: str, trained: Path, tasks: Path, expected: dict[str, float], tmp_path: Path
) -> None:
    text = Path(json.__file__).parent
    if layout == "one process":
        train_with_scores(text, tmp_path, tasks, Layout())
    else:
        ranks = 4 if layout == "tp x pp" else 2
        rank_pool(ranks).run(train_with_scores, text, tmp_path, tasks, LAYOUTS[layout])
    scores = read_scores(tmp_path / "parity")
    assert list(dict.fromkeys(score.step for score in scores)) == [5, 10, 12]
    last = {f"{score.task} {score.metric},none": score.value for score in scores if score.step == 12}
    assert {name: last[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_unknown_tasks_and_impossible_layouts_are_refused(trained: Path, tasks: Path) -> None:
    with pytest.raises(UserError, match="--tasks = 'wrods' is not a task of lm-eval\n  fix: did you mean 'words'"):
        command_output("evaluate", trained, "--tasks", "wrods", "--include-path", tasks)
    with pytest.raises(UserError, match="--tasks = 'xqzy' is not a task of lm-eval\n  fix: see `lm-eval ls tasks`"):
        command_output("evaluate", trained, "--tasks", "xqzy", "--include-path", tasks)
    with pytest.raises(UserError, match="--chat needs a chat template"):
        command_output("evaluate", trained, "--tasks", "words", "--include-path", tasks, "--chat")
    with pytest.raises(UserError, match="--tasks = 'wrods' is not a task of lm-eval"):
        command_output("evaluate", trained, "--tasks", "wrods", "--include-path", tasks, "--nproc", 2)
    with pytest.raises(UserError, match=r"layout\.tp = 3"):
        command_output(
            "evaluate", trained, "--tasks", "words", "--include-path", tasks, "--nproc", 3, "--set", "layout.tp=3"
        )
