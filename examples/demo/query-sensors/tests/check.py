import pathlib
import sys

sys.exit(pathlib.Path("/app/faulty.txt").read_text().split("\n") != ["garage", "garden", ""])
