"""`phalanx chat` on a run that was trained on conversations."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands.chat import answer_pieces, ending_of_answers
from phalanx.cli.main import app
from phalanx.data.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.model.huggingface.tokenizer import outdated_tokenizer_files
from phalanx.spec.errors import UserError
from phalanx.testing.processes import run_python
from phalanx.train.create_run import create_run
from tests.helpers.cli_runner import command_output
from tests.helpers.small_runs import make_trainer, small_run, train_to_end

EXCHANGE = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that has learned one answer."""
    folder = tmp_path_factory.mktemp("talker")
    (folder / "chats.jsonl").write_text("\n".join([json.dumps({"messages": EXCHANGE})] * 40))
    data = {
        "train": str(folder / "chats.jsonl"),
        "format": "chat",
        "chat_template": "plain",
        "tokenizer": "bytes",
        "cache": str(folder / "cache"),
    }
    training = {"training.precision": "fp32", "training.steps": 60, "training.seq_len": 64}
    run = small_run(Path(json.__file__).parent, folder, {"data": data, "optimizer.learning_rate": 3e-3, **training})
    directory = create_run(run, 1, resume=False)
    train_to_end(make_trainer(run))
    return directory


def say(directory: Path, text: str) -> str:
    command = ["chat", str(directory), "--temperature", "0", "--tokens", "20"]
    result = CliRunner().invoke(app, command, input=text, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_chat_answers_as_trained_and_ends_with_the_turn(talker: Path) -> None:
    assert say(talker, "ping\n") == "pong\n"
    assert say(talker, "ping\n/new\nping\n/quit\nping\n") == "pong\npong\n"


def test_chat_in_ranks_reads_and_prints_on_the_first(talker: Path, tmp_path: Path) -> None:
    (tmp_path / "messages.txt").write_text("ping\n/new\nping\n")
    command = [sys.executable, "-m", "phalanx", "chat", str(talker), "--temperature", "0", "--tokens", "20"]
    command += ["--nproc", "2", "--set", "layout.tp=2"]
    with open(tmp_path / "messages.txt") as messages:
        done = run_python(command, stdin=messages, timeout=300, text=True)
    assert (done.returncode, done.stdout) == (0, "pong\npong\n"), done.stderr


def test_export_has_the_template_of_the_run(talker: Path, tmp_path: Path) -> None:
    """Also if the model that it started from has another one."""
    from transformers import AutoTokenizer

    command_output("export", talker, tmp_path / "hf")
    rendered = AutoTokenizer.from_pretrained(tmp_path / "hf").apply_chat_template(EXCHANGE, tokenize=False)
    assert rendered == "User: ping\nAssistant: pong<|endoftext|>\n"
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "hf", other)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    texts = outdated_tokenizer_files(talker / "tokenizer.json", other)
    assert texts == {"chat_template.jinja"}
    assert outdated_tokenizer_files(talker / "tokenizer.json", tmp_path / "hf") == set()


def test_run_without_chat_template_is_refused(tmp_path: Path) -> None:
    run = small_run(Path(json.__file__).parent, tmp_path, {"training.precision": "fp32", "training.steps": 1})
    directory = create_run(run, 1, resume=False)
    train_to_end(make_trainer(run))
    with pytest.raises(UserError, match="has a tokenizer without a chat template"):
        command_output("chat", directory)


def test_answers_end_with_the_text_of_their_template() -> None:
    """Also where the ending is several tokens, which are held back until they are complete or are none."""
    ending = ending_of_answers(ChatTemplate(BUILT_IN_TEMPLATES["chatml"]), "</s>")
    assert ending == "<|im_end|>"
    tokens = list("a <|im_ä b<|im_end|>more".encode())
    pieces = list(answer_pieces(byte_tokenizer(), ending, tokens))
    assert "".join(pieces) == "a <|im_ä b"
    assert "a " in "".join(pieces[:3])
