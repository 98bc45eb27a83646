"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from server.routes.generate import model_not_found
from server.service import Service


def describe(service: Service) -> dict[str, Any]:
    """The served model as an OpenAI object."""
    model = service.model
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "lockstep",
        "max_model_len": model.info.max_model_len,
    }


def list_models(service: Service) -> dict[str, Any]:
    """All served models: one."""
    return {"object": "list", "data": [describe(service)]}


def retrieve_model(service: Service, model_id: str) -> dict[str, Any]:
    """One model by its name, which may contain slashes."""
    body = describe(service)
    if model_id != body["id"]:
        raise model_not_found(model_id)
    return body
