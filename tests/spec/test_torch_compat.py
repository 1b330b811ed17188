from typing import Any

import pytest

from phalanx.spec import torch_compat
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.torch_compat import check_torch_supports


@pytest.mark.parametrize("version", ["2.11.0+cu128", "2.12.1"])
def test_check_torch_supports_rejects_first_bucket_mb_before_torch_2_13(version: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch_compat, "version", lambda _: version)
    check_torch_supports(Layout())
    with pytest.raises(UserError, match=f"is not supported by torch {version[:4]}.*\n  fix: install torch 2.13"):
        check_torch_supports(Layout(first_bucket_mb=1.0))
    monkeypatch.setattr(torch_compat, "version", lambda _: "2.13.0+cpu")
    check_torch_supports(Layout(first_bucket_mb=1.0))
