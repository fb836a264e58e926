"""Policy ``last-first``: the reachable block that is closest to the reverse of the trained order."""

from ls_edge.runtime.routing.policies.policy import Policy


class LastFirst(Policy):
    """Run the last remaining block of the current band that can be reached."""

    name = "last-first"
    waits_for_next = True

    def wanted_order(self, bands, seed, request):
        """Return the reverse of the trained order within each band."""
        return bands.sort(reversed(range(bands.num_blocks)))
