"""The file that a node's ranks read their coordinator from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.runs.swarm_records import LINK_FILE, LinkRecord
from phalanx.spec.errors import UserError
from phalanx.swarm.worker import node_rank
from phalanx.swarm.worker.node_rank import NodeRank

LINK: LinkRecord = {
    "address": "lead:7000",
    "certificates": "/certs/ann",
    "node": "ann",
    "place": {"capacity": 2, "text": "0123"},
    "version": 3,
    "received_bytes": 10,
}


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({**LINK, "address": 3}).encode(),
        json.dumps({**LINK, "place": None}).encode(),
        json.dumps({**LINK, "version": -1}).encode(),
        json.dumps({key: value for key, value in LINK.items() if key != "node"}).encode(),
    ],
)
def test_rank_of_a_node_names_a_damaged_link_file(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_rank, "read_run_directory", lambda _: (None, None))
    if content is not None:
        (tmp_path / LINK_FILE).write_bytes(content)
    with pytest.raises(UserError, match=r"has a link\.json that cannot be read") as raised:
        NodeRank(tmp_path).run()
    assert raised.value.fix == "join again with phalanx swarm join"
