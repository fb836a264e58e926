"""Admission of processes and messages, based on ``peers.yaml`` and the bundle's manifest.

``messages`` checks each message alone, and ``keys`` checks keys. This module checks whether a HELLO comes from a listed
process with the same model (guarantee R7), and whether a RUN or STATE fits the model.
"""

from __future__ import annotations

from collections.abc import Iterable

from ls_edge.core.bundle import Manifest
from ls_edge.core.errors import WireError
from ls_edge.core.parts import ENDS, part_name, shown_parts
from ls_edge.core.peers_file import PeersFile
from ls_edge.core.text import short_id
from ls_edge.runtime.protocol.messages import Hello, Run, State, Welcome, may_be_called, without_alias
from ls_edge.runtime.protocol.payload import check_payload

GUESTS = ("observer", "pusher")
"""Roles of processes that take no part in routing: they have no model and may not send tokens."""
_ROLES = ("peer", "source", *GUESTS)


def _readable(name: str, role: str) -> str:
    """Return the name to show: a source without the suffix of its alias."""
    return without_alias(name) if role == "source" else name


class Admission:
    """Checks of a peer or a source."""

    def __init__(
        self,
        name: str,
        role: str,
        peers: PeersFile,
        manifest: Manifest,
        *,
        strict_bundle: bool,
        has_store: bool = False,
        closed: str = "",
    ) -> None:
        """Admit pushers with ``has_store``; ``closed`` is the reason to refuse all peers and sources, if any."""
        self._has_store = has_store
        self._closed = closed
        self.name, self.manifest = name, manifest
        self._role = role
        self._blocks = len(manifest.parts.blocks)
        self._peers = peers
        self.change(peers)
        self._strict = strict_bundle
        self._bands = manifest.block_bands

    def change(self, peers: PeersFile) -> None:
        """Use this file from now on; requests in flight may come from peers of the previous file."""
        self._known_peers = {peer.name for peer in (*self._peers.peers, *peers.peers)}
        self._peers = peers

    def reason_to_refuse(self, hello: Hello | Welcome, user: str) -> str:
        """Return why a process is not admitted, or ""; ``user`` is the owner of its key, empty without CURVE."""
        if hello.role not in _ROLES or hello.name == self.name:
            return f"hello from {hello.name!r} as {hello.role!r}: not a process of this fleet"
        listed = any(p.name == hello.name for p in self._peers.peers)
        is_taken = listed or any(s.name == hello.name for s in self._peers.sources)
        if user and user != hello.name and (is_taken or not may_be_called(user, hello.name)):
            return f"hello from {hello.name!r} with the key of {user!r}; each process needs its own key"
        if hello.role == "peer" and not listed:
            return f"peer {hello.name!r} is not in {self._peers.path}; add it there"
        if hello.role in _ROLES[1:]:
            if self._role == "source":
                return f"a {hello.role} does not link to sources"
            if listed:
                return f"{hello.name!r} is a peer of {self._peers.path}; a {hello.role} needs another name"
            if self._peers.uses_keys and not any(may_be_called(s.name, hello.name) for s in self._peers.sources):
                return f"source {hello.name!r} is not in {self._peers.path}; add it under 'sources'"
        if hello.role in GUESTS:
            if hello.blocks:
                return f"{hello.role} {hello.name!r} announces blocks, but cannot have any"
            return self.reason_to_refuse_pusher(user) if hello.role == "pusher" else ""
        if self._closed:
            return self._closed
        return self._reason_to_refuse_model(hello)

    def check_state(self, state: State, sender: str) -> None:
        """Raise :class:`WireError` if a STATE comes from a source, or names a block that the model lacks.

        Tokens on their way home go through peers, so the links of sources are of no use.
        """
        if sender not in self._known_peers:
            raise WireError(f"state of {sender}, which is not a peer; dropped")
        if unknown := [block for block in state.reach_blocks if block >= self._blocks and block not in ENDS]:
            raise WireError(f"state names block {max(unknown)}, which the model lacks; dropped")

    def check_run(self, run: Run, sender: str) -> None:
        """Raise :class:`WireError` if ``sender`` may not send these tokens with this itinerary.

        Each block of the model must have run, remain, or have been skipped, so that no block is lost unnoticed. The
        same holds for stem and head, unless the request has neither. The order must be one that the bands allow. A
        track has blocks of one band and is joined by a peer. Sources send and receive only their own requests. Where a
        part has run is not compared with ``peers.yaml``: its holder may have a newer file than this process.
        """
        check_payload(run, self.manifest)
        it = run.itinerary
        ran = (block for wave in it.waves for track in wave for block, _ in track)
        blocks = sorted([*ran, *it.remaining, *it.skipped])
        if it.track is not None:
            if it.source not in self._known_peers or blocks[-1:] > [self._blocks - 1] or it.track.before > self._blocks:
                raise WireError(f"invalid track of blocks {_listed(blocks)} for {it.source}; dropped")
            if len({self._bands.band_of(block) for block in blocks}) > 1:
                raise WireError(f"track of blocks {_listed(blocks)} spans more than one band; dropped")
        elif blocks != [*range(self._blocks), *(ENDS if it.has_stem else ())]:
            raise WireError(
                f"itinerary with blocks {_listed(blocks)}, the model has 0 to {self._blocks - 1} and each has run, "
                "remains or was skipped; dropped"
            )
        if len(it.skipped) > it.max_skips or not ENDS.keys().isdisjoint(it.skipped):
            raise WireError(f"itinerary with {len(it.skipped)} blocks skipped, it allows {it.max_skips}; dropped")
        # A source compares returned tokens with their request instead, and avoids a sender that lies.
        judged_here = self._role != "source" and (it.has_stem or not self._bands.is_one)
        if judged_here and (fault := self._bands.fault(it.arrangement, it.remaining)):
            raise WireError(f"itinerary in which {fault}; dropped")
        if self._role == "source" and (it.track is not None or it.source != self.name or not run.returning):
            raise WireError(f"tokens of {it.source} sent to a source, but not on their way home; dropped")
        if sender not in self._known_peers and (it.source != sender or it.track is not None or run.returning):
            raise WireError(f"tokens of {it.source}, sent by the source {sender}; dropped")

    def reason_to_refuse_pusher(self, user: str) -> str:
        """Return why a pusher is not admitted, or why it may not push any more, or ""."""
        if not self._has_store:
            return f"{self.name} was started with --bundle and accepts no other; start it with --store DIR"
        if not user:
            return f"{self._peers.path} of {self.name} has no keys, so nobody may push; make keys with 'ls-edge keys'"
        if user not in (may_push := [source.name for source in self._peers.sources if source.may_push]):
            return (  # the file may be an applied one, which nobody edits
                f"{user!r} may not push to {self.name}; use the key of {' or '.join(may_push) or 'another source'}, or "
                "apply with it a file that has 'may_push: true' below this one"
            )
        return ""

    def _reason_to_refuse_model(self, hello: Hello | Welcome) -> str:
        """Return why the model, bundle or blocks of a process do not fit, or ""."""
        manifest = self.manifest
        if hello.model_id != manifest.model_id:
            return (
                f"{_readable(hello.name, hello.role)} has model {short_id(hello.model_id)}, "
                f"{_readable(self.name, self._role)} has {short_id(manifest.model_id)}; "
                "give both bundles of the same run, with the same bands"
            )
        if self._strict and hello.bundle_id != manifest.bundle_id:
            return (
                f"{_readable(hello.name, hello.role)} has bundle {short_id(hello.bundle_id)}, "
                f"{_readable(self.name, self._role)} has {short_id(manifest.bundle_id)} and --strict-bundle is on; "
                "copy the same bundle to both"
            )
        if hello.role == "source":
            return f"source {hello.name!r} announces blocks, and sources have none" if hello.blocks else ""
        not_given = sorted(set(hello.blocks).difference(self._peers.peer(hello.name).blocks))
        if not_given:
            return (
                f"{hello.name} announces {part_name(not_given[0])}, which {self._peers.path} does not give it; copy "
                "the same peers.yaml to both"
            )
        return ""


def _listed(parts: Iterable[int]) -> str:
    return str(list(shown_parts(parts)))[:200]
