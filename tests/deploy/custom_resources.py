"""Checks a custom resource as its API server would: defaults, then the strict schema, then the CEL rules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.objects import Object, module

FOLDER = Path(__file__).parent / "schemas"
KINDS = {path.stem: path for path in FOLDER.glob("*.yaml")}


def schema_of(kind: str) -> Object | None:
    """The schema of a custom resource; None for what Kubernetes itself defines."""
    path = KINDS.get(kind.lower())
    return None if path is None else yaml.safe_load(path.read_text(encoding="utf-8"))


def with_defaults(value: Any, schema: Object) -> Any:
    """A copy in which what the schema gives is filled in, inside the objects that are there."""
    if isinstance(value, dict):
        filled = {key: copy.deepcopy(item) for key, item in value.items()}
        for key, part in schema.get("properties", {}).items():
            if key in filled:
                filled[key] = with_defaults(filled[key], part)
            elif "default" in part:
                filled[key] = part["default"]
        return filled
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    return value


def rules(value: Any, schema: Object, path: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """(path, the value there, rule, message) for every rule that applies."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path, value, rule["rule"], rule["message"]
    if isinstance(value, dict):
        for key, part in schema.get("properties", {}).items():
            if key in value:
                yield from rules(value[key], part, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from rules(item, schema.get("items", {}), f"{path}[{index}]")


def problems(document: Object) -> list[str]:
    """What an API server would say against a custom resource."""
    celpy, jsonschema = module("celpy"), module("jsonschema")
    schema = schema_of(document["kind"])
    assert schema is not None, document["kind"]
    filled = with_defaults(document, schema)
    found = [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(filled)
    ]
    if found:
        return found
    environment = celpy.Environment()
    for path, value, rule, message in rules(filled, schema):
        holds = environment.program(environment.compile(rule)).evaluate({"self": celpy.json_to_cel(value)})
        if not holds:
            found.append(f"{path}: {message}")
    return found
