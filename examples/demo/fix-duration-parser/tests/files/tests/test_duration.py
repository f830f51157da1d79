import unittest

from duration import format_duration, parse_duration


class ParseTest(unittest.TestCase):
    def test_minutes_and_seconds(self):
        self.assertEqual(parse_duration("2m5s"), 125)

    def test_spaces(self):
        self.assertEqual(parse_duration(" 1 h  30m "), 5400)

    def test_days(self):
        self.assertEqual(parse_duration("2d 1h"), 176400)

    def test_bad_text_is_refused(self):
        for text in ("", "5", "3x", "h", "1h and more"):
            with self.assertRaises(ValueError):
                parse_duration(text)

    def test_units_only_once(self):
        with self.assertRaises(ValueError):
            parse_duration("1h2h")


class FormatTest(unittest.TestCase):
    def test_format(self):
        self.assertEqual(format_duration(3725), "1h 2m 5s")

    def test_round_trip(self):
        for seconds in (0, 1, 59, 60, 3599, 3600, 86399, 86400, 200000):
            self.assertEqual(parse_duration(format_duration(seconds)), seconds)
