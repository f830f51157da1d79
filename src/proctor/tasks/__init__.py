"""The paper: task directories, datasets and the importers that make them."""

from proctor.tasks.load import load_task, problems

__all__ = ["load_task", "problems"]
