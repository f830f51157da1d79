import pathlib
import subprocess
import sys
import tempfile
import unittest

COUNT = pathlib.Path(__file__).resolve().parent.parent / "count.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(COUNT), *arguments], capture_output=True, text=True)


class CountTest(unittest.TestCase):
    def test_plain_output(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "a.txt")
            path.write_text("one two\nthree\n")
            self.assertEqual(run(str(path)).stdout, f"2\t3\t14\t{path}\n")

    def test_two_files(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in "ab":
                pathlib.Path(folder, name).write_text(name)
            result = run(str(pathlib.Path(folder, "a")), str(pathlib.Path(folder, "b")))
            self.assertEqual(len(result.stdout.splitlines()), 2)
