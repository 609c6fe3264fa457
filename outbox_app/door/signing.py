"""Signatures of requests and of answers: the profile of RFC 9421 that both sides demand.

Each message has one signature: by a registered key that is valid now, for at most 300 seconds, with
the tag ``outbox-v1``. It covers every part that gives the message its meaning; the signature of an
answer also covers the signature of its request. The digest covers the raw body. The signature
covers the digest, not the body, so all else is checked before the body is read: no stranger can
make a server wait for one. A signature that covers less is refused. The time is checked after the
signature, so only a message whose sender has the key tells of a clock that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from ..exceptions import OutboxError
from ..text import get_logger, one_line
from .exceptions import InvalidPeer
from .peers import Key, Peer

try:
    from http_message_signatures import (
        HTTPMessageSignaturesException,
        HTTPMessageSigner,
        HTTPMessageVerifier,
        HTTPSignatureAlgorithm,
        InvalidSignature,
        MappingKeyResolver,
        algorithms,
    )
except ImportError as error:
    raise InvalidPeer(
        "Peers over HTTP need http-message-signatures: pip install 'outbox-app[door]'."
    ) from error

from . import plain
from .plain import ANSWER, MEANT, REQUEST, TAG, VALID, PeerOf
from .plain import CLOCKS as CLOCKS

logger = get_logger("outbox_app.door")

ALGORITHMS: dict[str, type[HTTPSignatureAlgorithm]] = {
    "ed25519": algorithms.ED25519,
    "hmac-sha256": algorithms.HMAC_SHA256,
}


class NotBelieved(OutboxError):
    """The message is not signed as the profile demands."""


def sign(message: Any, body: bytes, key: Key) -> None:
    """Write digest and signature into the headers of a request, or of an answer.

    Raises ``InvalidPeer`` if the key is invalid.
    """
    now = datetime.now(UTC)
    if plain.sign(message, body, key, created=int(now.timestamp())):
        return
    signer = HTTPMessageSigner(
        signature_algorithm=ALGORITHMS[key.algorithm],
        key_resolver=MappingKeyResolver(public_keys={}, private_keys={key.id: key.read()}),
    )
    try:
        signer.sign(
            message,
            key_id=key.id,
            created=now,
            expires=now + timedelta(seconds=VALID),
            label="outbox",
            tag=TAG,
            covered_component_ids=_components(message),
            body=body,
        )
    except (HTTPMessageSignaturesException, ValueError, TypeError) as error:
        raise InvalidPeer(f"Nothing can be signed with the key {key.id!r}: {error}") from error


def verify(message: Any, read: Callable[[], bytes], peer_of: PeerOf) -> tuple[Peer, bytes]:
    """Check key, signature, time and digest, in this order; return the signing peer and the body.

    Args:
        read: Returns the body. It is called when everything but the digest is verified.
        peer_of: Returns the peer and the valid key for a key id, or None.

    Raises:
        NotBelieved: The message is not signed as the profile demands.
    """
    verifier, body = _Verifier(peer_of), None
    try:
        if found := plain.verify(message, peer_of):
            peer, digest = found
            body = read()
            if plain.digest(body) == digest:
                return peer, body
        # As no tag is passed, the library refuses a message that has two signatures.
        results = verifier.verify(message, max_age=None, require_components=_components(message))
        verifier.check_time()
        body = read() if body is None else body
        verifier.verify_body(message, results, body)
    except (HTTPMessageSignaturesException, InvalidPeer) as error:
        raise NotBelieved(str(error)) from error
    return verifier.peer, body


def _components(message: Any) -> tuple[str, ...]:
    if hasattr(message, "status_code"):
        return ANSWER
    return (*REQUEST, *(name for name in MEANT if name in message.headers))


class _Verifier(HTTPMessageVerifier):
    """Verifies one message, with the algorithm of its registered key."""

    max_clock_skew = timedelta(seconds=CLOCKS)
    peer: Peer

    def __init__(self, peer_of: PeerOf) -> None:
        super().__init__(signature_algorithm=algorithms.ED25519, key_resolver=None)
        self.peer_of = peer_of

    def validate_created_and_expires(
        self, sig_input: Any, max_age: timedelta | None = None
    ) -> None:
        """Check the profile. The library calls this before it checks the signature."""
        params = sig_input.params
        found = self.peer_of(params.get("keyid"))
        if found is None:
            id = one_line(params.get("keyid"), 80)
            raise InvalidSignature(f"The key {id!r} is unknown, or not valid now")
        self.peer, key = found
        self.signature_algorithm = ALGORITHMS[key.algorithm]
        self.key_resolver = MappingKeyResolver(public_keys={key.id: key.read()}, private_keys={})
        if params.get("tag") != TAG:
            raise InvalidSignature(f"The tag is not {TAG!r}")
        if not {"created", "expires"} <= params.keys():
            raise InvalidSignature("The signature lacks created or expires")
        if not 0 < params["expires"] - params["created"] <= VALID:
            raise InvalidSignature(f"The signature must expire within {VALID} s after its creation")
        self.sig_input = sig_input

    def check_time(self) -> None:
        params = self.sig_input.params
        away = params["created"] - datetime.now(UTC).timestamp()
        if not -VALID - CLOCKS < away < CLOCKS:
            logger.warning("Clock wrong, or message old key=%s seconds=%.0f", params["keyid"], away)
            raise InvalidSignature(
                f"The message was signed {abs(away):.0f} s {'ahead of' if away > 0 else 'behind'} "
                f"this clock: set the clock of this host, or of {self.peer.name!r}; or it is old"
            )
        super().validate_created_and_expires(self.sig_input)  # type: ignore[no-untyped-call]
