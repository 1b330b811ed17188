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
    inspected = json.loads(run_data_command("inspect", prefix, "--tokenizer", tokenizer, "--tokens", 12, "--json"))
    assert (inspected["documents"], inspected["tokens"], inspected["dtype"]) == (40, dataset.size, "uint16")
    assert inspected["first_tokens"] == dataset.tokens[:12].tolist()
    assert "".join(text).startswith(inspected["first_text"])
    assert inspected["longest_document"] == max(len(dataset.document(i)) for i in range(40))


def test_data_commands_print_summaries(corpus, tmp_path):
    output = run_data_command("prepare", corpus, "--out", tmp_path / "tokens", "--tokenizer", "bytes")
    assert "documents          40\n" in output
    output = run_data_command("inspect", f"{tmp_path / 'tokens'}.idx", "--tokenizer", "bytes")
    assert "first text           def function_0(x):" in output


def test_data_prepare_no_end_omits_end_tokens(corpus, tmp_path):
    run_data_command("prepare", corpus, "--out", tmp_path / "tokens", "--tokenizer", "bytes", "--no-end")
    assert IndexedDataset(tmp_path / "tokens").tokens.max() < 256


def test_data_prepare_reads_given_text_key(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "abc"}\n')
    run_data_command(
        "prepare", tmp_path / "a.jsonl", "--text-key", "content", "--out", tmp_path / "t", "--tokenizer", "bytes"
    )
    assert IndexedDataset(tmp_path / "t").tokens.tolist() == [97, 98, 99, 256]


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
        (["inspect", "missing"], "PREFIX"),
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
