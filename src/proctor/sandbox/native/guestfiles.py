"""File operations of a guest: execs whose program is part of the guest."""

from __future__ import annotations


class GuestFiles:
    """To be filled."""
