"""Protocol of client and server: JSON messages, and tensors as raw bytes in chunks of 1 MiB.

Checksums are XXH3 with 128 bits. TLS authenticates the sender; the checksums detect damage by disks, memory and
Phalanx.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import IO, Any

from phalanx.spec.files.tables import parse_json
from phalanx.swarm.tensor_files import CHUNK_BYTES, TensorFile

PROTOCOL_VERSION = 6
"""Version of the protocol, which must be equal on both ends."""
SERVICE = "phalanx.Swarm"
MAX_MESSAGE_BYTES = 2**24
"""Maximum number of bytes of a message; one message contains the checksums of thousands of pieces."""
Message = dict[str, Any]
OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.http2.max_frame_size", MAX_MESSAGE_BYTES - 1),  # the default of 16 KB costs a sixth of the time
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def pack(message: Message) -> bytes:
    """Return a message as bytes."""
    return json.dumps(message, separators=(",", ":")).encode()


def unpack(data: bytes) -> Message:
    """Return a message from bytes; raise ValueError if the bytes are not a message."""
    message = parse_json(data)
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def file_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks."""
    while data := file.read(CHUNK_BYTES):
        yield data


def tensor_chunks(file: TensorFile, keys: Sequence[str]) -> Iterator[bytes]:
    """Yield the bytes of tensors, several small ones per chunk; the file may be unlinked meanwhile."""
    pending: list[bytes] = []
    for key in keys:
        start, size = file.locate(key)
        for offset in range(start, start + size, CHUNK_BYTES):
            chunk = file.read_at(offset, min(CHUNK_BYTES, start + size - offset))
            if sum(map(len, pending)) + len(chunk) > CHUNK_BYTES:
                yield b"".join(pending)
                pending = []
            pending.append(chunk)
    yield b"".join(pending)
