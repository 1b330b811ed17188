"""`phalanx data` on the command line."""

import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands import data as command
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.sources import documents
from phalanx.data.tokenize import TokenizationCounts
from phalanx.data.tokenizer import load_tokenizer
from phalanx.spec.errors import UserError
from phalanx.train.create_run import create_run
from tests.helpers.cli_runner import command_output
from tests.integration.test_mixture import mixed_run


def run_data_command(*arguments):
    """Return the output of a successful call; a UserError is raised, as in `main`."""
    result = CliRunner().invoke(command.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_data_tokenizer_prepare_inspect_report_consistent_json(corpus, tmp_path):
    tokenizer, prefix = tmp_path / "new" / "tokenizer.json", tmp_path / "tokens" / "corpus"
    trained = json.loads(run_data_command("tokenizer", corpus, "--out", tokenizer, "--vocab", 300, "--json"))
    assert (trained["vocab"], load_tokenizer(tokenizer).vocab) == (300, 300)
    summary = json.loads(
        run_data_command("prepare", corpus, "--out", prefix, "--tokenizer", tokenizer, "--workers", 1, "--json")
    )
    text = [document.text for document in documents([str(corpus)])]
    dataset = IndexedDataset(prefix)
    assert summary["documents"] == len(dataset) == 40
    assert summary["tokens"] == dataset.size
    assert summary["text_bytes"] == sum(map(len, text))
    assert summary["bytes_per_token"] == pytest.approx(summary["text_bytes"] / summary["tokens"], abs=1e-3)
    assert summary["tokens_per_second"] > 0
    inspected = json.loads(run_data_command("inspect", prefix, "--tokenizer", tokenizer, "--json"))
    (facts,) = inspected["sources"]
    assert (facts["documents"], facts["tokens"], facts["pair"]["dtype"]) == (40, dataset.size, "uint16")
    assert facts["longest"][0][0] == max(len(dataset.document(i)) for i in range(40))


def test_data_commands_print_summaries(corpus, tmp_path):
    output = run_data_command("prepare", corpus, "--out", tmp_path / "tokens", "--tokenizer", "bytes")
    assert "documents          40\n" in output
    output = run_data_command("inspect", f"{tmp_path / 'tokens'}.idx", "--tokenizer", "bytes", "--seq-len", "32")
    assert "tokens per document" in output
    assert "│ " in output.partition("row 0: ")[2]


def test_data_prepare_no_end_omits_end_tokens(corpus, tmp_path):
    run_data_command("prepare", corpus, "--out", tmp_path / "tokens", "--tokenizer", "bytes", "--no-end")
    assert IndexedDataset(tmp_path / "tokens").tokens.max() < 256


def test_documents_end_with_the_given_end_token(corpus, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    run_data_command("tokenizer", corpus, "--out", tokenizer, "--vocab", 300)
    end = load_tokenizer(tokenizer).model.token_to_id(")")
    given = ("--tokenizer", tokenizer, "--end-token", ")")
    run_data_command("prepare", corpus, "--out", tmp_path / "tokens", *given)
    dataset = IndexedDataset(tmp_path / "tokens")
    assert {int(dataset.document(number)[-1]) for number in range(40)} == {end}
    run_data_command("inspect", tmp_path / "tokens", *given)
    with pytest.raises(UserError, match="was tokenized with another tokenizer"):
        run_data_command("inspect", tmp_path / "tokens", "--tokenizer", tokenizer)
    with pytest.raises(UserError, match=r"--end-token = '\)' has no effect with --tokenizer bytes"):
        run_data_command("prepare", corpus, "--out", tmp_path / "x", "--tokenizer", "bytes", "--end-token", ")")


def test_data_prepare_reads_given_text_key(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "abc"}\n')
    run_data_command(
        "prepare", tmp_path / "a.jsonl", "--text-key", "content", "--out", tmp_path / "t", "--tokenizer", "bytes"
    )
    assert IndexedDataset(tmp_path / "t").tokens.tolist() == [97, 98, 99, 256]


def test_data_prepare_lists_skipped_records(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": \n{"text": "d"}\n')
    arguments = ["prepare", tmp_path / "a.jsonl", "--out", tmp_path / "t", "--tokenizer", "bytes", "--json"]
    with pytest.raises(UserError, match=r"a.jsonl:2") as error_info:
        run_data_command(*arguments)
    assert error_info.value.fix.endswith("skip broken records with --max-bad-records")
    assert json.loads(run_data_command(*arguments, "--max-bad-records", 1))["bad_records"] == 1
    assert json.loads((tmp_path / "t.bad_records.jsonl").read_text())["record"] == 2


def test_data_inspect_reports_the_sources_of_a_run(tmp_path):
    for name, text in (("a.txt", "abc" * 30), ("b.txt", "abc" * 30), ("c.txt", "xy" * 40)):
        (tmp_path / name).write_text(text)
    (tmp_path / "run.toml").write_text(
        f"""
        [model]
        preset = "tiny"
        vocab_size = 257
        [data]
        tokenizer = "bytes"
        cache = "{tmp_path}/cache"
        [[data.source]]
        name = "letters"
        path = ["{tmp_path}/a.txt", "{tmp_path}/c.txt"]
        weight = 1
        [[data.source]]
        name = "more"
        path = "{tmp_path}/b.txt"
        weight = 1
        [training]
        seq_len = 64
        tokens_per_step = 128
        """
    )
    inspected = json.loads(run_data_command("inspect", tmp_path / "run.toml", "--json", "--rows", 1))
    letters, more = inspected["sources"]
    assert (letters["name"], letters["documents"], letters["text_bytes"], letters["tokens"]) == ("letters", 2, 170, 172)
    assert inspected["duplicates"] == {"documents": 1, "examples": [["a.txt", "b.txt"]]}
    assert more["rows"] == [
        [{"start": 0, "tokens": [97, 98, 99] * 21 + [97], "text": "abc" * 21 + "a", "trained": None}]
    ]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["prepare", "tokenizer"])
def test_data_commands_overwrite_files_only_with_force(corpus, tmp_path, name):
    arguments = [name, corpus, "--out", tmp_path / "made", *(["--tokenizer", "bytes"] if name == "prepare" else [])]
    run_data_command(*arguments)
    before = {path: path.read_bytes() for path in tmp_path.glob("made*")}
    with pytest.raises(UserError, match="already exists") as error_info:
        run_data_command(*arguments)
    assert "--force" in error_info.value.fix
    assert {path: path.read_bytes() for path in tmp_path.glob("made*")} == before
    run_data_command(*arguments, "--force")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["prepare", "missing", "--out", "out", "--tokenizer", "bytes"], "SOURCE"),
        (["prepare", "corpus", "--out", "out", "--tokenizer", "missing.json"], "data.tokenizer"),
        (["prepare", "corpus", "--out", "corpus/.hidden/out", "--tokenizer", "bytes"], "--out"),
        (["tokenizer", "missing", "--out", "out"], "SOURCE"),
        (["tokenizer", "corpus", "--out", "corpus/.hidden/out"], "--out"),
        (["inspect", "missing"], "SOURCE"),
    ],
)
def test_data_commands_reject_invalid_arguments(corpus, monkeypatch, arguments, field):
    monkeypatch.chdir(corpus.parent)
    with pytest.raises(UserError) as error_info:
        run_data_command(*arguments)
    assert error_info.value.field == field
    assert error_info.value.fix
    assert not list(corpus.parent.glob("out*"))


def test_data_progress_prints_periodic_lines_without_terminal(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    output = []
    print_counts = command._print_periodically(output.append)
    for second, count in ((1, 5), (10, 1000), (11, 2000), (19, 3000), (20, 4000)):
        clock[0] = second
        print_counts(TokenizationCounts(count, 10 * count, 0))
    assert output == ["1,000 documents, 10,000 tokens", "4,000 documents, 40,000 tokens"]


def test_data_command_import_does_not_load_torch_or_numpy():
    program = (
        "import sys, phalanx.cli.commands.data; "
        "print([m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_data_step_shows_documents_of_rows(documents, tmp_path):
    directory = create_run(mixed_run(documents, tmp_path), 1, resume=False)
    rows = json.loads(run_data_command("step", directory, "--step", 2, "--json"))["rows"]
    assert [row["row"] for row in rows] == list(range(8))
    lines = command_output("data", "step", directory, "--step", 2).splitlines()
    titles = [f"row {row['row']} of {row['source']}" for row in rows]
    assert [line for line in lines if line.startswith("row")] == titles
    expected = [
        f"  {part['location']}  tokens {part['first']:,} to {part['first'] + part['tokens'] - 1:,}  "
        for row in rows
        for part in row["documents"]
    ]
    printed = [line for line in lines if not line.startswith("row")]
    assert all(line.startswith(start) for line, start in zip(printed, expected, strict=True))
