import unittest

import text


class SlugTest(unittest.TestCase):
    def test_words(self):
        self.assertEqual(text.slugify("Hello, World!"), "hello-world")

    def test_accents(self):
        self.assertEqual(text.slugify("Crème brûlée in Zürich"), "creme-brulee-in-zurich")

    def test_runs_of_separators(self):
        self.assertEqual(text.slugify("  a -- b__c  "), "a-b-c")

    def test_length_limit_cuts_at_a_word(self):
        self.assertEqual(text.slugify("alpha beta gamma", max_length=12), "alpha-beta")
        self.assertEqual(text.slugify("alphabet", max_length=5), "alpha")

    def test_nothing_left(self):
        self.assertEqual(text.slugify("!!!"), "untitled")
