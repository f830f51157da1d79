#!/bin/sh
set -eu
cat >> text.py <<'PY'


def slugify(text, max_length=None):
    """A lower-case name of `a-z0-9` words joined by hyphens."""
    import re
    import unicodedata

    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    if max_length is not None and len(slug) > max_length:
        cut = slug[: max_length + 1]
        slug = cut.rsplit("-", 1)[0] if "-" in cut else slug[:max_length]
    return slug or "untitled"
PY
