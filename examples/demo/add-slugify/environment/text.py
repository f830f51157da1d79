"""Helpers for titles."""

SMALL = {"a", "an", "and", "of", "the", "in"}


def title_case(text):
    """Capitalise each word but the small ones (never the first)."""
    words = text.lower().split()
    return " ".join(word if word in SMALL and index else word.capitalize() for index, word in enumerate(words))
