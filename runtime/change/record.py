"""Record of a peer with a store: the bundle and file that it serves, and the steps that change them. Pure.

The store writes each new record atomically, so a process or a machine that stops at any moment starts from the state
before a step or after it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ls_edge.core.bundle import Digest

TRIAL_STARTS = 3
"""Starts of the process after which a peer gives up a bundle that never became warm."""
_MAX_ACCEPTED = 6
"""Limit on further accepted files, which interrupted changes leave; the oldest are dropped."""


class AppliedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``peers.yaml`` that ``ls-edge apply`` has sent."""

    version: int
    digest: Digest


class Before(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State before a switch."""

    active: Digest | None
    file: AppliedFile | None


class StoreRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of ``store.json``. Bundles are named by the SHA-256 of their manifest."""

    schema: Literal[1] = 1
    active: Digest | None = None
    """The served bundle."""
    previous: Digest | None = None
    """The previous bundle, which is kept."""
    trial_starts: int | None = None
    """Starts of the process with the active bundle, counted until it is warm for the first time; null after that."""
    failed: Digest | None = None
    """The last bundle that could not be served, or the last ``peers.yaml`` if only that had changed."""
    reason: str = ""
    """Reason why the peer does not serve the bundle that it should."""
    file: AppliedFile | None = None
    """The applied ``peers.yaml``; None for the one with which the peer was started."""
    before: Before | None = None
    """The state to return to if the active bundle and file do not become warm; null after that."""
    accepts: tuple[AppliedFile, ...] = ()
    """Other files whose processes are accepted until the change of the fleet has ended, the newest first."""

    @property
    def fallback(self) -> Before:
        """State to return to if the active bundle and file cannot be served."""
        return self.before or Before(self.previous, self.file)

    def accepting(self, file: AppliedFile, given: AppliedFile) -> StoreRecord:
        """Accept the processes of a file in addition; ``given`` is the file that counts if none was applied."""
        now = self.file or given
        others = tuple(one for one in self.accepts if one.digest not in (file.digest, now.digest))
        accepts = others if file.digest == now.digest else (file, *others)
        return msgspec.structs.replace(self, file=now, accepts=accepts[:_MAX_ACCEPTED])

    def switched(self, manifest: Digest, file: AppliedFile | None, *, is_listed: bool = True) -> StoreRecord:
        """Serve a bundle by a file, or nothing if the file does not list this peer."""
        if not is_listed and file is not None:
            reason = f"removed from the fleet by version {file.version} of peers.yaml"
            return StoreRecord(previous=manifest, file=self.file, accepts=self.accepts, reason=reason)
        if (self.active, self.file) == (manifest, file or self.file):
            return self
        others = (self.file, *self.accepts) if file is not None else self.accepts
        return StoreRecord(
            active=manifest,
            previous=self.previous if manifest == self.active else self.active,
            trial_starts=1,
            file=file or self.file,
            before=Before(self.active, self.file),
            accepts=tuple(one for one in others if one and (file is None or one.digest != file.digest)),
        )

    def confirmed(self) -> StoreRecord:
        """Record that the active bundle is warm."""
        record = msgspec.structs.replace(self, trial_starts=None, before=None)
        is_failed = self.failed is not None and self.failed in (self.active, self.file and self.file.digest)
        return msgspec.structs.replace(record, failed=None, reason="") if is_failed else record

    def given_up(self, reason: str) -> StoreRecord:
        """Return to the state before the last switch."""
        to = self.fallback
        is_same = self.before is not None and to.active == self.active
        accepts = self.accepts
        if self.file is not None and to.file != self.file:
            accepts = (self.file, *(one for one in accepts if one != to.file))
        return StoreRecord(
            active=to.active,
            previous=self.previous if is_same else None,
            failed=self.file.digest if is_same and self.file else self.active,
            reason=reason,
            file=to.file,
            accepts=accepts,
        )

    def ended(self) -> StoreRecord:
        """Accept only the processes of the applied file."""
        return msgspec.structs.replace(self, accepts=())
