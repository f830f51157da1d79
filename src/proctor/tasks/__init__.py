"""The paper: task directories, datasets and the importers that make them."""

from proctor.tasks.dataset import load_any
from proctor.tasks.load import load_task, problems
from proctor.tasks.predictions import Prediction, load_predictions

__all__ = ["Prediction", "load_any", "load_predictions", "load_task", "problems"]
