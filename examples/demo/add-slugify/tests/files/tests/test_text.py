import unittest

from text import title_case


class TitleTest(unittest.TestCase):
    def test_title(self):
        self.assertEqual(title_case("hello world"), "Hello World")

    def test_small_words(self):
        self.assertEqual(title_case("the lord of the rings"), "The Lord of the Rings")
