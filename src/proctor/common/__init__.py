"""Small things every room needs: errors, digests, canonical JSON, atomic files.

This is the lowest layer of the house; it imports nothing from the rooms above it.
"""

from proctor.common.digests import canonical_json, digest_bytes, digest_file, digest_json, digest_tree
from proctor.common.errors import ConfigError, ExitCode, InfraError, ProctorError, RefusedError
from proctor.common.files import atomic_write, state_dir
from proctor.common.ids import new_id

__all__ = [
    "ConfigError",
    "ExitCode",
    "InfraError",
    "ProctorError",
    "RefusedError",
    "atomic_write",
    "canonical_json",
    "digest_bytes",
    "digest_file",
    "digest_json",
    "digest_tree",
    "new_id",
    "state_dir",
]
