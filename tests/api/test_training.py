"""Training from Python: the launcher in its own process, its errors and its interrupts."""

from __future__ import annotations

import builtins
import json
import logging
import os
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.api.training import _follow_output, _launcher_environment, train_run
from phalanx.spec.errors import UserError, UserErrorGroup, error_from_record
from phalanx.spec.files.load import run_from_table


def test_train_run_raises_user_error_of_run_that_cannot_start(tmp_path: Path) -> None:
    run = run_from_table({"model": {"preset": "tiny"}, "output_dir": str(tmp_path), "layout": {"tp": 3}})
    with pytest.raises(UserError) as error_info:
        train_run(run, nproc=2, quiet=True)
    assert (error_info.value.field, error_info.value.value) == ("layout.tp", 3)
    assert error_info.value.fix
    assert not list(tmp_path.iterdir())


def test_train_run_raises_user_error_that_only_ranks_find(tmp_path: Path) -> None:
    model = {"preset": "tiny", "implementation": "email.mime.nothing:Net"}
    data, training = {"tokenizer": "bytes"}, {"steps": 2}
    run = run_from_table({"model": model, "data": data, "training": training, "output_dir": str(tmp_path)})
    with pytest.raises(UserError, match="cannot be imported") as error_info:
        train_run(run, nproc=1, quiet=True)
    assert (error_info.value.field, error_info.value.value) == ("model.implementation", "email.mime.nothing:Net")


@pytest.mark.parametrize(
    "error",
    [
        UserError("a.b", 3, "is wrong: 3 > 2", "set it to 2"),
        UserError("a", None, "bad"),
        UserErrorGroup([UserError("a", "x", "bad"), UserError("b", [1], "worse", "c")]),
    ],
)
def test_error_of_record_equals_original(error: UserError) -> None:
    restored = error_from_record(json.loads(json.dumps(error.to_record())))
    assert (type(restored), str(restored), restored.to_record()) == (type(error), str(error), error.to_record())


def test_follow_prints_lines_and_keeps_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; [print(n) for n in range(60)]; sys.exit(75)"
    code, lines = _follow_output([sys.executable, "-c", program], dict(os.environ), quiet=False)
    assert code == 75
    assert lines == [f"{n}\n" for n in range(10, 60)]
    assert capsys.readouterr().out.splitlines() == [str(n) for n in range(60)]


def test_interrupt_stops_the_launcher_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "saved"
    program = (
        "import pathlib, signal, sys\n"
        f"def stop(*_): pathlib.Path({str(saved)!r}).touch(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('started', flush=True)\n"
        "signal.pause()"
    )

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "print", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _follow_output([sys.executable, "-c", program], dict(os.environ), quiet=False)
    assert saved.exists()


def test_launcher_imports_the_same_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")  # relative, as in a checkout
    monkeypatch.chdir(tmp_path)
    program = [sys.executable, "-c", "import phalanx; print(phalanx.__file__)"]
    code, lines = _follow_output(program, _launcher_environment("run.toml"), quiet=True)
    assert (code, lines) == (0, [f"{phalanx.__file__}\n"])


def test_environment_variables_of_fields_do_not_change_a_run_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRAINING__STEPS", "5")
    assert "PHALANX_TRAINING__STEPS" in _launcher_environment("run.toml")
    assert "PHALANX_TRAINING__STEPS" not in _launcher_environment(run_from_table({"model": {"preset": "tiny"}}))


def test_launcher_environment_has_level_of_program_unless_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("phalanx")
    monkeypatch.delenv("PHALANX_LOG", raising=False)
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    assert "PHALANX_LOG" not in _launcher_environment("run.toml")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    assert _launcher_environment("run.toml")["PHALANX_LOG"] == "warning"
    monkeypatch.setenv("PHALANX_LOG", "debug")
    assert _launcher_environment("run.toml")["PHALANX_LOG"] == "debug"
