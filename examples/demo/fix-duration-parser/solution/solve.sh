#!/bin/sh
set -eu
python3 - <<'PY'
import pathlib
path = pathlib.Path("duration.py")
text = path.read_text()
text = text.replace('UNITS = {"h"', 'UNITS = {"d": 86400, "h"')
start, end = text.index("    return sum("), text.index("\n\n\ndef format_duration")
text = text[:start] + """    if not re.fullmatch(r"\\s*(\\d+\\s*[dhms]\\s*)+", text):
        raise ValueError(f"not a duration: {text!r}")
    pairs = re.findall(r"(\\d+)\\s*([dhms])", text)
    if len({unit for _, unit in pairs}) != len(pairs):
        raise ValueError(f"a unit is given twice: {text!r}")
    return sum(int(number) * UNITS[unit] for number, unit in pairs)""" + text[end:]
path.write_text(text)
PY
