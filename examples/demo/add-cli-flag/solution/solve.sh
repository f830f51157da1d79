#!/bin/sh
set -eu
cat > count.py <<'PY'
#!/usr/bin/env python3
"""Count lines, words and bytes of files."""

import argparse
import json
import sys


def count(path):
    with open(path, "rb") as file:
        data = file.read()
    return data.count(b"\n"), len(data.split()), len(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("files", nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    for path in arguments.files:
        try:
            lines, words, size = count(path)
        except OSError as error:
            print(f"count.py: {path}: {error.strerror}", file=sys.stderr)
            sys.exit(2)
        rows.append({"file": path, "lines": lines, "words": words, "bytes": size})
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("{lines}\t{words}\t{bytes}\t{file}".format(**row))


if __name__ == "__main__":
    main()
PY
