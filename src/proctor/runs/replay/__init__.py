"""Doing a trial again: its actions in a rebuilt sandbox, its model answers to its harness, or a branch off one step."""
