"""Bundles and files that tests give to running peers, as ``ls-edge apply`` does."""

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.clients.apply import Applier
from ls_edge.runtime.transport.keys import KeyPair, load_secret


def give(file, bundle, keys, new=None, **named):
    """Apply a bundle (if any), or the previous one, and a file to the peers of ``file``; return their results."""
    opened = bundle if bundle in (None, "previous") or isinstance(bundle, Bundle) else Bundle.open(bundle)
    keys = keys if isinstance(keys, KeyPair) else load_secret(keys)
    with Applier(new or file, file, opened, keys=keys, **{"wait": 60.0, "connect": 60.0, **named}) as applier:
        change = applier.look()
        try:
            applier.apply(change)
        finally:
            give.found = applier.results(change)
    return give.found
