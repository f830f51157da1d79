"""A cache with a fixed capacity."""


class Cache:
    """Evicts the least recently used entry when it is full."""

    def __init__(self, capacity):
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        self._entries = {}

    def get(self, key, default=None):
        """The value of `key`, or `default`."""
        return self._entries.get(key, default)

    def put(self, key, value):
        """Store a value, evicting one entry if there is no room."""
        if key not in self._entries and len(self._entries) >= self.capacity:
            oldest = next(iter(self._entries))
            del self._entries[oldest]
        self._entries[key] = value

    def __len__(self):
        return len(self._entries)
