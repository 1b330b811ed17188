"""Checks and messages when a run is created, and resumes of runs whose text was moved or changed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.tokenizer import load_tokenizer, train_bpe
from phalanx.model.huggingface.export import export_hf
from phalanx.runs.create import RUN_FILE, claim_run_directory, read_run_directory, run_directory
from phalanx.runs.events import STARTED, append_event
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run, run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import UNDECIDED_STEPS
from phalanx.train.create_run import check_and_prepare, create_run, decide_choices
from phalanx.train.time_budget import with_decided_steps
from tests.helpers.small_runs import DENSE, MOE, make_trainer, save_two_checkpoints, small_run, train_until


def write_sources(folder: Path) -> None:
    """Write a directory of texts, and records next to it."""
    (folder / "texts").mkdir(parents=True)
    for number in range(40):
        (folder / "texts" / f"text{number:02}.txt").write_text(f"text {number} says hello to text {number * 7}\n" * 5)
    rows = [json.dumps({"text": f"record {number} " * 9}) for number in range(40)]
    (folder / "more.jsonl").write_text("\n".join(rows))


def train_and_save(train: list[str], **data: Any) -> Path:
    """Train a step on these sources and save it; return the run directory."""
    table = {
        "model": {**DENSE, "vocab_size": 300},
        "data": {"train": train, "tokenizer": "bpe", "tokenizer_vocab": 300, "cache": "cache", **data},
        "training": {"steps": 4, "seq_len": 16, "tokens_per_step": 64, "precision": "fp32"},
    }
    run = run_from_table(table)
    directory = create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    train_until(trainer, 1)
    trainer.save()
    trainer.checkpointer.wait()
    return directory


def test_end_token_of_the_run_ends_documents_and_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    train_bpe(["hello to text 1\n" * 99], 300).save(tmp_path / "tokenizer.json")
    table = {
        "model": {**DENSE, "vocab_size": 300},
        "data": {"train": ["texts"], "tokenizer": "tokenizer.json", "end_token": "t", "cache": "cache"},
        "training": {"steps": 4, "seq_len": 16, "tokens_per_step": 64},
    }
    directory = create_run(run_from_table(table), 1, resume=False)
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    assert tokenizer.model.id_to_token(tokenizer.end) == "t"
    prepared = read_run_directory(directory)[1]
    assert load_tokenizer(prepared.tokenizer).end == tokenizer.end
    train = IndexedDataset(prepared.train)
    assert {int(train.document(number)[-1]) for number in range(len(train))} == {tokenizer.end}
    # Without it, the text is tokenized again, and its end token is a known one.
    del table["data"]["end_token"]
    other = create_run(run_from_table({**table, "name": "other"}), 1, resume=False)
    assert load_tokenizer(other / "tokenizer.json").end == 0
    assert read_run_directory(other)[1].train != prepared.train


def test_new_run_of_large_model_names_choices_that_are_not_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    model = {**DENSE, "vocab_size": 100_000, "hidden_size": 256}
    data = {"train": ["texts"], "cache": "cache"}
    run = run_from_table({"model": model, "data": data, "training": {"steps": 4, "seq_len": 16, "tokens_per_step": 64}})
    check_and_prepare(run, 1, resume=False)
    unset = "data.tokenizer (bpe), data.tokenizer_vocab (2048; the model has 100000), checkpoint.every (500)."
    assert f"phalanx: not set: {unset}" in capsys.readouterr().err


def test_new_run_notes_rows_of_model_without_tokens(text, tmp_path, capsys):
    for vocab_size in (257, 1000):
        run = small_run(text, tmp_path / str(vocab_size), {"model": {**DENSE, "vocab_size": vocab_size}})
        check_and_prepare(run, 1, resume=False)
        assert ("set model.vocab_size = 257" in capsys.readouterr().err) == (vocab_size == 1000)


@pytest.mark.parametrize("root", [".", "..", "inner/.."])
def test_run_with_relative_sources_resumes_from_its_directory(tmp_path, monkeypatch, root):
    (tmp_path / "work" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    write_sources(Path(root))
    directory = train_and_save([f"{root}/texts", f"{root}/more.jsonl"])
    monkeypatch.chdir("/")
    resumed = load_run(directory / RUN_FILE)
    _, expected = check_and_prepare(resumed, 1, resume=True)
    assert len(list((tmp_path / "work" / "cache").iterdir())) == 1  # and its text is not tokenized again
    (tmp_path / "elsewhere").mkdir()
    for name in ("texts", "more.jsonl"):
        shutil.move(tmp_path / "work" / root / name, tmp_path / "elsewhere" / name)
    sources = [str(tmp_path / "elsewhere" / name) for name in ("texts", "more.jsonl")]
    moved = load_run(directory / RUN_FILE, [f"data.train={json.dumps(sources)}"])
    _, prepared = check_and_prepare(moved, 1, resume=True)
    # The text is prepared again, with the same tokens.
    assert (prepared.train, prepared.held_out) != (expected.train, expected.held_out)
    for name in ("train", "held_out"):
        tokens, expected_tokens = (IndexedDataset(getattr(data, name)) for data in (prepared, expected))
        assert tokens.fingerprint() == expected_tokens.fingerprint()


def test_resume_with_changed_text_offers_tokens_of_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    directory = train_and_save(["texts"])
    (tmp_path / "texts" / "text07.txt").write_text("another text\n" * 9)
    with pytest.raises(UserError, match="differs from the checkpoint's data") as caught:
        check_and_prepare(load_run(directory / RUN_FILE), 1, resume=True)
    overrides = re.findall(r"--set ([a-z._]+=)'?([^' ]+)", caught.value.fix)
    assert [name for name, _ in overrides] == ["data.train=", "data.held_out=", "data.tokenizer="]
    check_and_prepare(load_run(directory / RUN_FILE, [name + value for name, value in overrides]), 1, resume=True)


def test_create_run_reports_pairs_whose_tokenizer_is_unknown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    _, prepared = check_and_prepare(load_run(train_and_save(["texts"]) / RUN_FILE, ["name=other"]), 1, resume=False)
    assert "matches" not in capsys.readouterr().err
    sources = {"train": [prepared.train], "held_out": [prepared.held_out], "tokenizer": prepared.tokenizer}
    run = run_from_table(
        {"name": "pairs", "model": {**DENSE, "vocab_size": 300}, "data": {**sources, "cache": "cache"}}
    )
    check_and_prepare(run, 1, resume=False)
    assert capsys.readouterr().err == ""
    for prefix in (prepared.train, prepared.held_out):
        Path(f"{prefix}.meta.json").unlink()
    check_and_prepare(run, 1, resume=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"matches the tokens of {prepared.train} and 1 more, because" in line


def test_create_run_offers_to_extend_vocabulary_of_weights(tmp_path, build_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    model = build_model(ModelSpec.model_validate({**DENSE, "vocab_size": 200}), None)
    export_hf(model.spec, dict(model.named_parameters()), tmp_path / "hf")
    table = {"model": {"from_hf": "hf"}, "data": {"train": ["texts"], "tokenizer": "bytes", "cache": "cache"}}
    with pytest.raises(UserError, match=r"model\.vocab_size = 200 is less than the tokenizer's 257 tokens") as caught:
        check_and_prepare(run_from_table(table), 1, resume=False)
    assert caught.value.fix.startswith(
        "set model.vocab_size = 257; the embeddings of new tokens are initialized to the mean"
    )
    table["data"]["tokenizer"] = "bpe"
    with pytest.raises(UserError, match=r"data\.tokenizer = 'bpe' would train a new tokenizer"):
        check_and_prepare(run_from_table(table), 1, resume=False)
    table["data"]["tokenizer"] = "bytes"
    check_and_prepare(run_from_table({**table, "model": {"from_hf": "hf", "vocab_size": 257}}), 1, resume=False)


UNEXPORTABLE = {
    "model.norm = 'layernorm'": {"model": {**DENSE, "norm": "layernorm"}},
    "model.moe.router_score = 'softmax'": {"model": MOE},
}


@pytest.mark.parametrize("field", UNEXPORTABLE)
def test_new_run_names_the_field_that_cannot_be_exported_once(text, tmp_path, capsys, field):
    check_and_prepare(small_run(text, tmp_path, UNEXPORTABLE[field]), 1, resume=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be exported" in line]
    assert len(lines) == 1
    assert field in lines[0]


def test_exportable_and_resumed_runs_print_nothing_about_export(text: Path, tmp_path: Path, capsys):
    check_and_prepare(small_run(text, tmp_path, {}), 1, resume=False)
    run = small_run(text, tmp_path, {"model": MOE})
    save_two_checkpoints(text, tmp_path)
    capsys.readouterr()
    check_and_prepare(run, 1, resume=True)
    assert "exported" not in capsys.readouterr().err


def test_resume_without_checkpoint_says_that_it_starts_over(text: Path, tmp_path: Path, capsys):
    run = small_run(text, tmp_path, {})
    message = f"phalanx: no checkpoint in {run_directory(run)} yet: starting from step 0\n"
    check_and_prepare(run, 1, resume=False)
    assert "no checkpoint" not in capsys.readouterr().err
    check_and_prepare(run, 1, resume=True)
    assert message in capsys.readouterr().err
    save_two_checkpoints(text, tmp_path)
    check_and_prepare(small_run(text, tmp_path, {"model": MOE}), 1, resume=True)
    assert "no checkpoint" not in capsys.readouterr().err


def test_resumed_run_keeps_the_steps_that_its_seconds_gave(tmp_path, capsys):
    run = run_from_table({"training": {"seconds": 9}, "output_dir": str(tmp_path)})
    claim_run_directory(run_directory(run))
    (run_directory(run) / RUN_FILE).write_text(to_toml(with_decided_steps(run, 60)))
    assert decide_choices(run, resume=True).training.steps == 60
    assert "this run keeps the 60 steps of its first start" in capsys.readouterr().err
    assert not decide_choices(run, resume=False).training.has_decided_steps


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training": {"steps": 2}}, "training.steps 4 -> 2: the learning rate follows the new schedule, 0.0015 at"),
        ({"optimizer": {"learning_rate": 0.01}}, "optimizer.learning_rate 0.003 -> 0.01: the learning rate"),
        ({"training": {"steps": 8}}, ""),  # both warm up alike
        ({}, ""),
    ],
)
def test_resumed_run_reports_jump_of_learning_rate(tmp_path, monkeypatch, capsys, changes, expected):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    run = load_run(train_and_save(["texts"]) / RUN_FILE)
    tables = {table: getattr(run, table).model_copy(update=fields) for table, fields in changes.items()}
    capsys.readouterr()
    check_and_prepare(run.model_copy(update=tables), 1, resume=True)
    printed = capsys.readouterr().err
    assert expected in printed
    assert ("at step 1 -> " in printed) == bool(expected)


def test_resumed_run_names_changes_of_ranks_and_layout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    directory = train_and_save(["texts"])
    run = load_run(directory / RUN_FILE)
    append_event(directory, STARTED, ranks=1, step=0, settings=run.settings)
    capsys.readouterr()
    check_and_prepare(run, 1, resume=True)
    assert "carried over" not in capsys.readouterr().err
    check_and_prepare(load_run(directory / RUN_FILE, ["layout.data_parallel=zero1"]), 2, resume=True)
    expected = "1 rank -> 2, layout.data_parallel ddp -> zero1: weights, optimizer state and the position"
    assert expected in capsys.readouterr().err


def test_resume_with_a_further_source_offers_the_tokenizer_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    (tmp_path / "new.txt").write_text("quite another vocabulary " * 40)
    sources = [{"name": "a", "path": "texts", "weight": 1}, {"name": "b", "path": "more.jsonl", "weight": 1}]
    run = load_run(train_and_save([], source=sources) / RUN_FILE)
    further = run.data.source[0].replace(name="c", path=[str(tmp_path / "new.txt")])
    run = run.replace(data=run.data.replace(source=[*run.data.source, further]))
    with pytest.raises(UserError, match="differs from the checkpoint's data") as refused:
        check_and_prepare(run, 1, resume=True)
    (tokenizer,) = re.findall(r"--set data.tokenizer=(\S+)", refused.value.fix)
    check_and_prepare(run.replace(data=run.data.replace(tokenizer=tokenizer)), 1, resume=True)


def test_resumed_run_counts_epochs_from_what_it_has_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    run_file = train_and_save(["texts"]) / RUN_FILE
    no_steps = [f"training.steps={UNDECIDED_STEPS}", "training.epochs=2"]
    steps = [
        check_and_prepare(load_run(run_file, [*no_steps, f"training.tokens_per_step={batch}"]), 1, True)[
            0
        ].training.steps
        for batch in (64, 128)
    ]
    assert steps[1] == 1 + (steps[0] - 1) // 2


def test_resumed_run_without_its_text_offers_its_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    run_file = train_and_save(["texts"]) / RUN_FILE
    (tmp_path / "texts").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="does not exist") as refused:
        check_and_prepare(load_run(run_file), 1, resume=True)
    offered = re.findall(r"--set (\S+)", refused.value.fix)
    check_and_prepare(load_run(run_file, [setting.replace("'", "") for setting in offered]), 1, resume=True)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match="does not exist") as refused:
        check_and_prepare(load_run(run_file), 1, resume=True)
    assert "or keep" not in refused.value.fix


@pytest.mark.parametrize(("memory_bytes", "method"), [(10**12, "none"), (42 * 10**7, "full")])
def test_create_run_records_recomputation_that_fits_in_memory(text, tmp_path, capsys, memory_bytes, method):
    model = {"preset": "tiny", "num_layers": 12}
    cluster = {"device": "cpu", "memory_bytes": memory_bytes, "cores": 1, "nproc_per_node": 1}
    layout = {"activation_checkpointing": "auto", "micro_batch_size": 8}
    tables = {"model": model, "cluster": cluster, "layout": layout}
    run = small_run(text, tmp_path, {**tables, "training.seq_len": 256, "training.tokens_per_step": 2**13})
    recorded = load_run(create_run(run, 1, resume=False) / RUN_FILE).layout
    assert (recorded.activation_checkpointing, recorded.auto_checkpointing) == (method, False)
    assert (recorded.recomputed_blocks is not None) == (method != "none")
    assert f"activation checkpointing chosen: recompute {method}" in capsys.readouterr().err
