"""Cameras and network streams by the names that users give them, and names that people may see."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

_SCHEMES = "rtsp|rtsps|rtspu|rtsph|rtmp|rtmps|rtmpe|rtmpt|http|https|udp|tcp|rtp|srt|mms|mmsh|mmst"
_STREAM = re.compile(rf"({_SCHEMES})://(.+)", re.IGNORECASE | re.DOTALL)
_URL = re.compile(r"([a-z][a-z0-9+.-]{0,40}:/+)(.*)", re.IGNORECASE | re.DOTALL)
_VALUES = re.compile(r"[?#;=:]|%3[ADF]", re.IGNORECASE)
"""Begin of query, parameters, or fragment; some cameras have them, or user and password, as a part of their path."""
_KEY = re.compile(r"(?:^|[?&;#,\s])([^?&;#,\s=/]+)=(?=[^=\s])")
_SECRET = re.compile(r"(?<=/)(?=[^/]*\d)(?=[^/]*[a-z])[^/]*(?:[a-z0-9]{16}|[a-z0-9_-]{20})[^/]*", re.IGNORECASE)
"""Part of a path that nobody could guess, such as the identifier of a stream that is shared by its address."""
_STREAM_KEY = re.compile(r"(?<=/)[^/]+/*\Z")
_CAMERA = re.compile(r"camera(?::(\d*|/.+))?")
_DEVICE = re.compile(r"/dev/(?:video\d+|v4l/.+)")
_VIDEO4LINUX = 81  # major number of cameras, whose devices udev may give any name
_PLAIN_HOST = re.compile(r"(?:\[[^\]]*\]|[^/?#:;=%]*)(?::\d*)?(?=[/?#]|\Z)")


@dataclass(frozen=True)
class FrameSource:
    """A camera or a network stream."""

    name: str
    """Name without secrets; nothing else is printed, logged, or written."""
    address: int | str = field(repr=False)
    """Number of a camera, path of its device, or URL."""
    is_device: bool = False

    @classmethod
    def parse(cls, given: str) -> FrameSource | None:
        """Return the camera or stream that an argument names; None for files and all others."""
        if camera := _CAMERA.fullmatch(given):
            place = camera[1] or "0"
            return cls(given, int(place) if place.isdigit() else place, is_device=True)
        if _DEVICE.fullmatch(given) or _is_camera(given):
            return cls(given, given, is_device=True)
        if stream := _STREAM.fullmatch(given):
            return cls(visible_name(given), f"{stream[1].lower()}://{stream[2]}")
        return None

    @property
    def advice(self) -> str:
        """Advice on a source that cannot be opened."""
        if self.is_device:
            return "check that it is connected and that no other program uses it"
        user = str(self.address).partition("://")[2].rpartition("@")[0]
        escapes = "; in a password, write @ as %40 and # as %23" if re.search(r"[@#?/]", user) else ""
        return f"check the address, user, and password{escapes}"


def _is_camera(path: str) -> bool:
    with contextlib.suppress(OSError):  # too long
        return Path(path).is_char_device() and os.major(os.stat(path).st_rdev) == _VIDEO4LINUX
    return False


def visible_name(given: str) -> str:
    """Return a name that people may see: a URL without user, password, and values; else the name itself.

    Passwords may hold any character, escaped or not: when in doubt, more of the address is hidden.
    """
    url = _URL.search(given)
    if url is None:
        user, at, rest = given.rpartition("@")
        return f"…@{rest}" if at and ":" in user else given
    rest = url[2]
    path, _, query = rest.partition("?")
    if "@" in path or ("@" in query and not (_PLAIN_HOST.match(rest) and "=" in query.partition("@")[0])):
        rest = rest.rpartition("@")[2]
        path = rest.partition("?")[0]
    if not _PLAIN_HOST.match(path):  # a user and a password without a host
        rest = re.split("[:%]", path)[0]
    host = _PLAIN_HOST.match(rest)
    mark = _VALUES.search(rest, 0 if host is None else host.end())
    cut = len(rest) if mark is None else rest.rfind("/", 0, mark.start()) + 1 if mark[0] in "=:" else mark.start()
    path, values = _SECRET.sub("…", rest[:cut]), rest[cut:]
    if url[1].lower().startswith("rtmp"):
        path = _STREAM_KEY.sub("…", path)
    keys = "&".join(f"{key}=…" for key in _KEY.findall(values))
    hidden = keys or "…" * (len(values) > 1)
    return f"{url[1]}{path}{'?' if hidden else ''}{hidden}"
