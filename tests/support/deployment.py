"""The files of service/deploy, read as the tools that they are for read them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pageturner.service.config import LoadedConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "service" / "deploy"


def documents(path: Path) -> list[Any]:
    """Every document of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def kubernetes_documents() -> Iterator[tuple[str, Any]]:
    """Every object of the manifests that names its kind and is whole, with the file that it is from."""
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml")):
        for document in documents(path):
            if path.name not in ("kustomization.yaml", "prometheus-adapter.yaml", "certificates.yaml"):
                yield str(path.relative_to(DEPLOY)), document


def of_kind(kind: str) -> list[Any]:
    """The objects of one kind."""
    return [document for _, document in kubernetes_documents() if document["kind"] == kind]


def configuration(path: Path, folder: Path) -> LoadedConfig:
    """A TOML file of the deployment, loaded without any environment; a copy in `folder`, whose path may not
    enter Python's own."""
    assert tomllib.loads(path.read_text(encoding="utf-8"))
    copy = folder / path.name
    copy.write_bytes(path.read_bytes())
    return load_config(copy, {})
