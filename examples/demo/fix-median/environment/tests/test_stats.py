import unittest

from stats import median, mode


class MedianTest(unittest.TestCase):
    def test_odd_count(self):
        self.assertEqual(median([3, 1, 2]), 2)

    def test_single_value(self):
        self.assertEqual(median([7]), 7)

    def test_input_is_not_changed(self):
        values = [3, 1, 2]
        median(values)
        self.assertEqual(values, [3, 1, 2])


class ModeTest(unittest.TestCase):
    def test_most_common(self):
        self.assertEqual(mode([1, 2, 2]), 2)

    def test_tie_gives_smallest(self):
        self.assertEqual(mode([2, 1, 1, 2]), 1)
