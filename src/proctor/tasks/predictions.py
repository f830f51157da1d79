"""Predictions: patches made elsewhere, to be graded without an agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError
from proctor.tasks.rows import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.tasks.rows import Row

_SUFFIXES = (".json", ".jsonl")


@dataclass(frozen=True, slots=True)
class Prediction:
    """One patch for one instance. An empty patch is a prediction, and unresolved."""

    instance_id: str
    patch: str
    model: str | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to apply (SWE-bench never runs these and counts them as unresolved)."""
        return not self.patch.strip()


def load_predictions(path: Path) -> dict[str, Prediction]:
    """Read `.jsonl`, a `.json` list, or a `.json` map from instance id to prediction (or to the patch itself).

    Keys: `instance_id`, `model_patch` (or `patch`), `model_name_or_path`; others are not used. A null patch is
    an empty one. Raises ConfigError naming every bad row.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError("unknown kind of predictions file", field=str(path), remedy=f"one of {', '.join(_SUFFIXES)}")
    predictions: dict[str, Prediction] = {}
    errors: list[ConfigError] = []
    for row in _rows(path):
        try:
            prediction = _prediction(row)
            if prediction.instance_id in predictions:
                raise ConfigError(f"a second prediction for {prediction.instance_id}", field=row.where)
        except ConfigError as error:
            errors.append(error)
        else:
            predictions[prediction.instance_id] = prediction
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError(f"{len(errors)} rows are wrong: " + "; ".join(e.line() for e in errors), field=str(path))
    if not predictions:
        raise ConfigError("holds no predictions", field=str(path))
    return predictions


def _rows(path: Path) -> list[Row]:
    if path.suffix.lower() == ".json" and path.is_file():
        mapped = read_map(path)
        if mapped is not None:
            return mapped
    return read_rows(path)


def read_map(path: Path) -> list[Row] | None:
    """Rows of a JSON map from instance id to prediction; None when the file is something else."""
    import json

    from proctor.tasks.rows import Row

    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None  # read_rows says what is wrong, with its line
    if not isinstance(value, dict) or "instance_id" in value:
        return None
    rows = []
    for name, one in value.items():
        data: dict[str, Any] = {"model_patch": one} if one is None or isinstance(one, str) else one
        where = f"{path} key {name}"
        if not isinstance(data, dict):
            raise ConfigError(f"a prediction should be an object or a patch, not {type(one).__name__}", field=where)
        rows.append(Row(where, {"instance_id": name, **data}))
    return rows


def _prediction(row: Row) -> Prediction:
    name = row.data.get("instance_id")
    if not isinstance(name, str) or not name:
        raise ConfigError("instance_id is missing", field=row.where)
    where = f"{row.where} ({name})"
    key = "model_patch" if "model_patch" in row.data else "patch"
    if key not in row.data:
        raise ConfigError("neither model_patch nor patch is there", field=where)
    patch = row.data[key]
    if patch is not None and not isinstance(patch, str):
        raise ConfigError(f"{key} should be a string, not {type(patch).__name__}", field=where)
    model = row.data.get("model_name_or_path")
    if model is not None and not isinstance(model, str):
        raise ConfigError("model_name_or_path should be a string", field=where)
    return Prediction(name, patch or "", model)
