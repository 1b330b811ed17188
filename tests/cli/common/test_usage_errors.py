"""Errors in a command line have one form, independent of the code that raises them."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from phalanx.cli import main
from phalanx.cli.common.usage_errors import FREE_TEXT_OPTIONS, TEXT_COMMANDS, refuse_urls
from phalanx.cli.main import COMMANDS, PANELS
from phalanx.spec.errors import UserError
from phalanx.testing.processes import run_python
from tests.helpers import cli_runner


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--top", "foo"), "--top = 'foo' must be a whole number\n  fix: see `phalanx plan --help`"),
        (("plan", "--top", 0), "--top = '0' must be greater than or equal to 1"),
        (
            ("plan", "explain", "run.toml", "foo"),
            "K = 'foo' must be a whole number\n  fix: see `phalanx plan explain ",
        ),
        (
            ("plan", "--tokens", "15T"),
            r"--tokens = '15T' must be a valid number\n  fix: write the number without a unit: "
            r"--tokens 16492674416640 \(15 x 2\^40\), or --tokens 15000000000000$",
        ),
        (("plan", "--tokens", "many"), "--tokens = 'many' must be a valid number"),
        (("plan", "--top"), "--top requires an argument\n  fix: see --help"),
        (("plan", "run.toml", "--json=3"), "--json does not take a value"),
        (("plan", "run.toml", "--token", 1), "option = '--token' is not known\n  fix: did you mean '--tokens'"),
        (
            ("plan",),
            r"^RUN\.toml\|MODEL is missing\n  fix: write: .*plan \[OPTIONS\] \{?RUN\.toml\|MODEL\}? \| COMMAND \.{3}$",
        ),
        (
            ("plan", "a.toml", "explain"),
            r"got unexpected extra argument\(s\) \(explain\)\n  fix: write a command first, such as `.*plan explain`; ",
        ),
        (("memory", "a.toml", "b.toml"), r"memory got unexpected extra argument\(s\) \(b.toml\)\n  fix: see `"),
        (("--bogus",), "option = '--bogus' is not known"),
        (
            ("init", "run.toml", "--task", "preetrain"),
            "--task = 'preetrain' is not known\n  fix: did you mean 'pretrain'",
        ),
        (
            ("init", "run.toml", "--task", "chat"),
            "--task = 'chat' is not known\n  fix: use one of: continue, dpo, lora, pretrain, sft",
        ),
        (("memory",), r"^RUN\.toml\|MODEL is missing\n  fix: write: .*memory \[OPTIONS\] \{?RUN\.toml"),
        (
            ("launch", "run.toml"),
            r"^--to is missing\n  fix: write: .*launch .*RUN\.toml\}? --to slurm\|kubernetes\|skypilot",
        ),
        (("advise",), r"^\[oom\] RUN\.toml\|MODEL is missing"),
        (("pipeline", "bogus"), "command = 'bogus' is not known\n  fix: use one of: check, show, split"),
        (("planning",), "command = 'planning' is not known\n  fix: use one of: advise, "),
    ],
)
def test_translate_usage_errors_converts_typer_errors_to_user_errors(arguments, message):
    with pytest.raises(UserError, match=message):
        cli_runner.command_output(*arguments)


def test_usage_error_is_printed_on_stderr_with_exit_code_2():
    done = run_python([sys.executable, "-m", "phalanx", "plan", "--top", "few"], text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("phalanx: --top = 'few' must be a whole number\n  fix: ")


def test_main_help_does_not_import_numpy_pydantic_or_torch():
    assert not cli_runner.imported_packages("--help")


def test_help_lists_every_command_with_its_summary_in_a_panel():
    lines = [line.strip("│ ") for line in cli_runner.command_output("--help", width=120).splitlines()]
    for panel, summaries in PANELS.items():
        assert any(line.startswith(f"╭─ {panel} ─") for line in lines)
        for name, summary in summaries.items():
            assert any(re.fullmatch(rf"{name} +{re.escape(summary)}", line) for line in lines), name
            assert len(summary) <= 60


def test_every_command_file_has_a_summary():
    files = {path.stem for path in Path(main.__file__).with_name("commands").glob("*.py")}
    assert set(COMMANDS) <= files


def test_command_group_without_arguments_prints_help():
    for arguments in ((), ("data",)):
        assert "Usage" in cli_runner.command_output(*arguments, exit_code=2)


URL = "s3://bucket/path"


def _command(name):
    group: Any = typer.main.get_command(main.app)
    return group.get_command(None, name)


def _arguments_with_url(command, command_words):
    """Yield command lines of a command and its subcommands: one for each option and argument, with a URL as value."""
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from _arguments_with_url(subcommand, (*command_words, name))
    for parameter in command.params:
        option = parameter.opts[0] if parameter.param_type_name == "option" else None
        if option is None:
            if command_words not in TEXT_COMMANDS:
                yield (*command_words, URL), "argument"
        elif not getattr(parameter, "is_flag", False) and option not in (*FREE_TEXT_OPTIONS, "--upload"):
            yield (
                (*command_words, option, *["other"] * (parameter.nargs - 1), URL),
                option if parameter.nargs == 1 else URL,
            )
            yield (*command_words, f"{option}={URL}"), option


def test_url_is_refused_in_every_option_and_argument_that_may_name_a_file():
    lines = [line for name in COMMANDS for line in _arguments_with_url(_command(name), (name,))]
    assert len(lines) > 200
    for arguments, name in lines:
        with pytest.raises(UserError, match=r"is a URL, but (only local paths|an address)") as error_info:
            cli_runner.command_output(*arguments)
        assert name in str(error_info.value)
        assert f"= '{URL}'" in str(error_info.value)


@pytest.mark.parametrize("words", [("report", "--json", URL), ("data", "step", "--json", URL)])
def test_url_after_a_flag_is_an_argument(words):
    with pytest.raises(UserError, match=f"^argument = '{URL}' is a URL"):
        cli_runner.command_output(*words)


def test_text_in_an_object_store_may_be_inspected():
    for words in (("data", "inspect", URL), ("data", "inspect", "--json", URL)):
        refuse_urls(words, is_flag=lambda option: option == "--json")
    with pytest.raises(UserError, match="SOURCE = 's4://bucket' has an unknown scheme"):
        cli_runner.command_output("data", "inspect", "s4://bucket")


@pytest.mark.parametrize("words", [words for words in TEXT_COMMANDS if words != ("data", "inspect")])
def test_text_may_be_in_an_object_store_but_not_the_output(words):
    with pytest.raises(UserError, match="--out is missing"):
        cli_runner.command_output(*words, URL)
    with pytest.raises(UserError, match=r"--out = 's3://.*' is a URL, but only local paths"):
        cli_runner.command_output(*words, URL, "--out", URL)
    with pytest.raises(UserError, match="SOURCE = 's4://bucket' has an unknown scheme"):
        cli_runner.command_output(*words, "s4://bucket")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("swarm", "status", "https://host:7077", "--certs", "ann"), "argument"),
        (("swarm", "join", "--certs", "ann", "http://host:7077"), "argument"),
        (("swarm", "text", "tcp://host:7077", "checksum", "--certs", "lead"), "argument"),
        (("swarm", "serve", "swarm.toml", "--certs", "lead", "--listen", "https://0.0.0.0:7077"), "--listen"),
        (("train", "run.toml", "--rendezvous=tcp://host:29500"), "--rendezvous"),
    ],
)
def test_url_in_place_of_an_address_is_not_called_a_path(words, name):
    with pytest.raises(UserError, match="is a URL, but an address has no scheme") as error_info:
        cli_runner.command_output(*words)
    assert error_info.value.field == name
    assert error_info.value.fix.startswith("write host:port")


def test_options_of_free_text_exist_and_take_a_url():
    parameters = [parameter for name in COMMANDS for parameter in _command(name).params]
    assert {option for parameter in parameters for option in parameter.opts} >= set(FREE_TEXT_OPTIONS)
    with pytest.raises(UserError, match=r"run directory|has no"):
        cli_runner.command_output("generate", "no-run", "--prompt", URL)
