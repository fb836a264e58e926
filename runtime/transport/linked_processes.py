"""Which processes are linked: the name and the key behind each link, how many there may be, and who is greeted when.

A link carries one name. HELLO is sent again on a link that we dialled, after a delay that doubles, until WELCOME comes.
"""

from __future__ import annotations

from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.protocol.messages import Hello, Welcome
from ls_edge.runtime.transport.admission import GUESTS
from ls_edge.runtime.transport.links import Link

GREETING_DELAY, MAX_GREETING_DELAY = 0.5, 8.0
"""Seconds until a HELLO that was not answered by WELCOME is repeated; doubled each time, up to the second."""
MAX_SOURCES = 256
"""Most processes that are linked at once beyond the peers of ``peers.yaml``."""
MAX_SOURCES_OF_ONE_KEY = 64
"""Most of these that may have one key, so that the others of the file find room."""


class LinkedProcesses:
    """The processes that greeted the process ``name`` and were let in."""

    def __init__(self, name: str, peers: PeersFile) -> None:
        self.links_of: dict[str, list[Link]] = {}
        """The links of each, those that we dialled first."""
        self.name_of: dict[Link, str] = {}
        self.user_of: dict[Link, str] = {}
        """The name behind the key of each link, empty without CURVE."""
        self.guests: dict[str, str] = {}
        """Linked processes that routing knows nothing of: name to role, ``observer`` or ``pusher``."""
        self.listed = {peer.name for peer in peers.peers}
        """Names of the peers of ``peers.yaml``."""
        self._name = name
        self._path = peers.path
        self._greeting_due: dict[Link, tuple[float, float]] = {}

    def reason_to_refuse(self, link: Link, greeting: Hello | Welcome, user: str) -> str:
        """Return why a process may not have this name on this link; empty where it may."""
        name = greeting.name
        if link.dialled and name != link.dialled:
            return (
                f"the process that listens at the address of {link.dialled!r} is {name!r}; correct the addresses in "
                f"{self._path}"
            )
        before = self.name_of.get(link, name)
        if name != before:
            return f"hello from {name!r} on the link of {before!r}; a link carries one name"
        if name in self.links_of and self.guests.get(name, "") != (greeting.role if greeting.role in GUESTS else ""):
            return f"hello from {name!r} as {greeting.role!r}, and it has a link in another role"
        if name not in self.listed and name not in self.links_of:
            others = sum(one not in self.listed for one in self.links_of)
            if others >= MAX_SOURCES:
                return f"{others} sources are linked to {self._name}, which is the most; try again later"
            if user and sum(self.user_of[links[0]] == user for links in self.links_of.values()) >= (
                MAX_SOURCES_OF_ONE_KEY
            ):
                return f"{MAX_SOURCES_OF_ONE_KEY} sources have the key of {user!r} at {self._name}, which is the most"
        return ""

    def add(self, link: Link, name: str, user: str) -> bool:
        """Note who is behind a link; return whether that was not known."""
        links = self.links_of.setdefault(name, [])
        if link in links:
            return False
        links.append(link)
        links.sort(key=lambda one: not one.dialled)
        self.name_of[link], self.user_of[link] = name, user
        return True

    def link_ended(self, link: Link) -> str | None:
        """Forget a link; return the name of the process behind it, None where it is not known."""
        self._greeting_due.pop(link, None)
        name = self.name_of.pop(link, None)
        self.user_of.pop(link, None)
        links = [] if name is None else self.links_of.get(name, [])
        if link in links:
            links.remove(link)
        return name

    def forget(self, name: str, now: float) -> None:
        """Forget a process and its links; where one stands that we dialled, it is greeted again."""
        self.guests.pop(name, None)
        for link in self.links_of.pop(name, []):
            self.name_of.pop(link, None)
            self.user_of.pop(link, None)
            if link.dialled:  # the link stands, unless it ends too, as after a goodbye
                self._greeting_due[link] = (now + MAX_GREETING_DELAY, MAX_GREETING_DELAY)

    # Greetings.

    def greeted(self, link: Link, now: float) -> None:
        """HELLO was sent on a link for the first time."""
        self._greeting_due[link] = (now + GREETING_DELAY, GREETING_DELAY)

    def answered(self, link: Link) -> None:
        """WELCOME came."""
        self._greeting_due.pop(link, None)

    def awaits_welcome(self, link: Link) -> bool:
        """Whether HELLO was sent on a link and has to be repeated, since no WELCOME came."""
        return link in self._greeting_due

    @property
    def next_greeting(self) -> float:
        """When the next of :meth:`due_greetings` is due; infinity where there is none."""
        return min((at for at, _ in self._greeting_due.values()), default=float("inf"))

    def due_greetings(self, now: float) -> list[Link]:
        """Return the links on which HELLO is to be sent again now; the next time is set."""
        if not self._greeting_due:
            return []
        due = [(link, wait) for link, (at, wait) in self._greeting_due.items() if at <= now]
        for link, wait in due:
            later = min(2 * wait, MAX_GREETING_DELAY)
            self._greeting_due[link] = (now + later, later)
        return [link for link, _ in due]
