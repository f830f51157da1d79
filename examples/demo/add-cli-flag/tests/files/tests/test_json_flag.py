import json
import pathlib
import tempfile
import unittest

from tests.test_count import run


class JsonFlagTest(unittest.TestCase):
    def test_json_output(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = pathlib.Path(folder, "a"), pathlib.Path(folder, "b")
            first.write_text("one two\nthree\n")
            second.write_text("x")
            result = run("--json", str(first), str(second))
            self.assertEqual(
                json.loads(result.stdout),
                [
                    {"file": str(first), "lines": 2, "words": 3, "bytes": 14},
                    {"file": str(second), "lines": 0, "words": 1, "bytes": 1},
                ],
            )

    def test_json_of_an_empty_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "empty")
            path.touch()
            result = run("--json", str(path))
            self.assertEqual(json.loads(result.stdout), [{"file": str(path), "lines": 0, "words": 0, "bytes": 0}])

    def test_missing_file_is_exit_2(self):
        for mode in ([], ["--json"]):
            result = run(*mode, "/nonexistent/file")
            self.assertEqual(result.returncode, 2)
            self.assertIn("/nonexistent/file", result.stderr)
            self.assertNotIn("Traceback", result.stderr)
