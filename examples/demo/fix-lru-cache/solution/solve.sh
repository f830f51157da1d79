#!/bin/sh
set -eu
python3 - <<'PY'
import pathlib
path = pathlib.Path("cache.py")
text = path.read_text()
text = text.replace(
    "        return self._entries.get(key, default)\n",
    "        if key not in self._entries:\n"
    "            return default\n"
    "        self._entries[key] = self._entries.pop(key)\n"
    "        return self._entries[key]\n",
)
text = text.replace(
    "        if key not in self._entries and len",
    "        self._entries.pop(key, None)\n        if len",
)
path.write_text(text)
PY
