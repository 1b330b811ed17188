"""Errors of a node's connection in the words of its owner: an unreachable coordinator, or one that rejects the node."""

from __future__ import annotations

from phalanx.spec.errors import UserError
from phalanx.swarm.coordinator.update_checks import UpdateRejected

SERVE_FIX = "check that phalanx swarm serve runs at this address"
AUTHORITY_FIX = "issue both certificates with one authority: phalanx swarm certs"
UNREACHABLE_REASONS = {
    "address lookup failed": ("the host is unknown", "correct the address"),
    "CERTIFICATE_VERIFY_FAILED": (
        "the coordinator's certificate is from another authority, or has expired",
        AUTHORITY_FIX,
    ),
    "certificate required": ("the coordinator rejected this node's certificate", AUTHORITY_FIX),
    "Hostname": (
        "the coordinator's certificate is for another name or address",
        "issue the certificate with phalanx swarm certs --host ADDRESS",
    ),
    "WRONG_VERSION_NUMBER": ("the server at this address does not use TLS", SERVE_FIX),
    "Connection refused": ("no server listens at this address", SERVE_FIX),
}
"""Reason and fix for an unreachable coordinator, by a phrase of gRPC's message."""
PERMANENT_PHRASES = tuple(UNREACHABLE_REASONS)[:-1]
"""Phrases of errors that are permanent."""
REJECTION_FIXES = {
    "text": "use the text of the other nodes, or ask the operator to run phalanx swarm text {address} CHECKSUM",
    "not permitted": "use the certificate of the coordinator: --certs certs/lead",
    "damaged model": "ask the operator to restore the coordinator's model, and run the same command again",
}
"""Fix by the owner of a rejected node, by the first words of the reason."""


def rejection_error(address: str, rejected: UpdateRejected) -> UserError:
    """Return why a coordinator rejected a node, and what its owner can do."""
    kind = str(rejected).partition(":")[0]
    fix = REJECTION_FIXES.get(kind, "run phalanx swarm status, and use the coordinator's version of Phalanx")
    return UserError("swarm", address, f"rejected this node: {rejected}", fix=fix.format(address=address))


def unreachable_error(address: str, details: str) -> UserError:
    """Return why a coordinator cannot be reached, as far as TLS and the network report it."""
    problem, fix = next(
        (reason for phrase, reason in UNREACHABLE_REASONS.items() if phrase in details),
        (details or "no answer", SERVE_FIX),
    )
    return UserError("ADDRESS", address, f"cannot be reached: {problem}", fix)
