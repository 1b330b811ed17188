"""The rendezvous address of several nodes."""

from __future__ import annotations

from socket import gaierror

import pytest

from phalanx.cli.commands import train_start
from phalanx.spec.errors import LocalNodeError


def test_resolve_rendezvous_retries_until_host_name_resolves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host name of the first pod resolves only when the pod has an address."""
    errors: list[OSError] = [gaierror(-2, "Name or service not known")] * 2

    def look_up(host: str) -> str:
        assert host == "first-0.first"
        if errors:
            raise errors.pop()
        return "10.0.0.7"

    monkeypatch.setattr(train_start, "gethostbyname", look_up)
    monkeypatch.setattr(train_start, "RETRY_SECONDS", 0)
    assert train_start.resolve_rendezvous("first-0.first:29500", 2, 60) == ("first-0.first", 29500)
    assert capsys.readouterr().err.count("first-0.first cannot be resolved") == 1
    errors += [gaierror(-2, "Name or service not known")]
    with pytest.raises(LocalNodeError, match=r"has a host that cannot be resolved: Name or service not known"):
        train_start.resolve_rendezvous("first-0.first:29500", 2, -1)
