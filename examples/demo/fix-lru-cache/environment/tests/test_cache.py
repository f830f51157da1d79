import unittest

from cache import Cache


class BasicTest(unittest.TestCase):
    def test_put_and_get(self):
        cache = Cache(2)
        cache.put("a", 1)
        self.assertEqual(cache.get("a"), 1)

    def test_missing_gives_default(self):
        self.assertEqual(Cache(1).get("a", "none"), "none")

    def test_capacity_is_kept(self):
        cache = Cache(2)
        for number in range(10):
            cache.put(number, number)
        self.assertEqual(len(cache), 2)

    def test_zero_capacity_is_refused(self):
        with self.assertRaises(ValueError):
            Cache(0)
