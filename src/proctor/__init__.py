"""Proctor examines AI agents: real isolated computers, clean-room grading, scores that can be trusted."""

__version__ = "0.1.0"
