"""What a build step needs to know of this machine to reach package registries: certificates, proxies, apt and pip
settings.

All of it is there while building only and stays out of the image: variables of the step's environment, and files in a
directory that is mounted for the time of the step.
"""

from __future__ import annotations

import configparser
import os
from pathlib import Path

from proctor.sandbox.images.debian import machine_apt

BUILD_DIR = "/run/proctor-build"
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/cert.pem", "/etc/pki/tls/certs/ca-bundle.crt")
_PASSED = (
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "PIP_INDEX_URL",
    "PIP_TRUSTED_HOST",
    "UV_INDEX_URL",
    "UV_DEFAULT_INDEX",
)
_TRUST = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS")


def index_environment() -> dict[str, str]:
    """Variables that say how packages are fetched: index and proxies."""
    env = {name: os.environ[name] for name in _PASSED if name in os.environ}
    index = _pip_index()
    if index:
        env.setdefault("PIP_INDEX_URL", index)
    if "PIP_INDEX_URL" in env:
        env.setdefault("UV_DEFAULT_INDEX", env["PIP_INDEX_URL"])
    return env


def build_environment() -> dict[str, str]:
    """Variables for a build step."""
    env = index_environment()
    env.update({name: f"{BUILD_DIR}/ca.crt" for name in _TRUST})
    env.update(
        APT_CONFIG=f"{BUILD_DIR}/apt.conf",
        DEBIAN_FRONTEND="noninteractive",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        # Every version of pip reads this as "no cache"; "1" breaks those before 19.0.
        PIP_NO_CACHE_DIR="off",
        PIP_ROOT_USER_ACTION="ignore",
        UV_NATIVE_TLS="1",
    )
    return env


def build_files() -> dict[str, bytes]:
    """Files of the directory that a build step sees at BUILD_DIR."""
    bundle = next((Path(path) for path in _BUNDLES if Path(path).is_file()), None)
    return {
        "ca.crt": bundle.read_bytes() if bundle else b"",
        "apt.conf": "".join(f"{line}\n" for line in machine_apt().options).encode(),
    }


def _pip_index() -> str | None:
    """The package index that pip is configured with on this machine, if any."""
    for path in (Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(path, encoding="utf-8")
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue
        index = parser.get("global", "index-url", fallback=None)
        if index and not index.startswith("file:"):
            return index
    return None
