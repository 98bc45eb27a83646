"""The only reader of flags and environment. One frozen model; a field is a flag, a variable and a line of --help."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

import runtime
from runtime.api import MAX_DRAFTS, ConfigError, EngineConfig

ENV_PREFIX = "LOCKSTEP_"
EMBEDDED_NAME = "lockstep-tiny"
PROPOSER = re.compile(r"none|auto|[a-z][a-z0-9_]*:[0-9]+")


def embedded_model_dir() -> Path:
    """The model inside the package."""
    return Path(runtime.__path__[0]) / "assets" / "model"


class Settings(BaseModel):
    """Everything `lockstep serve` can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model_dir: str = Field("", description="Directory with config.json, safetensors and tokenizer.json.")
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    served_model_name: str = Field("", max_length=256, description="Name clients use; default: the directory's name.")
    api_key: tuple[str, ...] = Field((), description="Bearer key clients must send; may be repeated. Without: open.")

    speculative: str = Field(
        "auto", description="Drafting: METHOD:K (mtp:3, ngram:4), none, or auto (mtp:3 when the model has MTP heads)."
    )
    prefill_backend: Literal["snapshot", "replay"] = Field("snapshot", description="Commit strategy, prefill half.")
    decode_backend: Literal["snapshot", "replay"] = Field("replay", description="Commit strategy, decode half.")
    speculative_attention_mode: Literal["decode", "prefill"] = Field(
        "decode", description="Which half verifies drafted tokens."
    )
    dtype: str = Field("float32", description="Type of weights and activations.")
    device: str = Field("cpu", description="Device the engine runs on.")
    max_model_len: int = Field(0, ge=0, le=2**24, description="Longest prompt plus answer; 0: the model's own limit.")
    max_num_seqs: int = Field(32, ge=1, le=4096, description="Requests computed at once.")
    max_num_batched_tokens: int = Field(512, ge=1, le=2**20, description="Tokens computed in one step.")
    max_prefill_tokens: int = Field(
        0, ge=0, le=2**20, description="Prompt tokens in a step in which others generate; 0: what the step has left."
    )
    max_queued_requests: int = Field(1024, ge=1, le=2**20, description="Requests that may wait; more get 429.")
    max_queued_tokens: int = Field(
        2**20, ge=0, le=2**40, description="Prompt tokens of waiting requests; more get 429. 0: no limit."
    )
    priority_aging_tokens: int = Field(
        4096, ge=1, le=2**40, description="Computed tokens after which a request overtakes newer ones one priority up."
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens in one KV block.")
    num_blocks: int = Field(0, ge=0, le=2**31 - 1, description="KV blocks; 0: derived from model and memory.")
    num_slots: int = Field(0, ge=0, le=2**31 - 1, description="Recurrent state slots; 0: derived.")
    prefix_cache: Literal["on", "off"] = Field(
        "on", description="Keep KV and recurrent states of texts that may come again."
    )
    checkpoint_interval: int = Field(
        256, ge=1, le=2**24, description="Tokens between two states kept inside a text; at least 1 + drafts."
    )
    num_checkpoints: int = Field(0, ge=0, le=2**24, description="Recurrent states kept for reuse; 0: derived.")
    memory_gb: float = Field(
        0.0, ge=0, le=2**20, description="Memory of the engine process, in GiB, on a CPU; 0: half of what is there."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the device's memory that is used, by everybody on it, on a GPU."
    )
    host_cache_gb: float = Field(
        0.0, ge=0, le=2**20, description="Host memory, in GiB, for cached KV and states the device has no room for."
    )
    settle_lag: int = Field(0, ge=0, le=1, description="Steps the host half of a commit may lag.")
    threads: int = Field(0, ge=0, le=4096, description="Compute threads; 0: follow CPU quota and affinity.")
    audit_interval: int = Field(0, ge=0, description="Recompute one request's state every N steps; 0: never.")

    generation_config: Literal["model", "none"] = Field(
        "model", description="Sampling defaults: the model's generation_config.json, or the API's own."
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, le=2**30, description="Largest request body.")
    max_choices: int = Field(128, ge=1, le=4096, description="Prompts times n in one request.")
    request_timeout: float = Field(
        0.0, ge=0, le=86400, description="Seconds a request may take that names no time itself; 0: any time."
    )
    body_timeout: float = Field(30.0, gt=0, le=3600, description="Seconds a client may take to send its body.")
    drain_timeout: float = Field(300.0, ge=0, le=86400, description="Seconds running requests may take after SIGTERM.")
    write_timeout: float = Field(
        60.0, gt=0, le=86400, description="Seconds a client may leave its full buffer (64 KiB) unread."
    )
    stall_timeout: float = Field(
        60.0, gt=0, le=86400, description="Seconds without progress of the engine after which /live fails."
    )
    stall_action: Literal["report", "restart"] = Field(
        "report", description="A stalled engine: only fail /live, or also kill and restart it."
    )
    engine_restarts: int = Field(
        3, ge=0, le=1000, description="Restarts in a row of an engine that ended; then /live fails for good."
    )
    engine_restart_backoff: float = Field(
        1.0, ge=0, le=60, description="Seconds before a restart, doubled for each further one in a row, at most 60."
    )
    engine_restart_reset: float = Field(
        600.0, gt=0, le=86400, description="Seconds an engine must serve for earlier restarts to be forgotten."
    )
    engine_start_timeout: float = Field(
        1800.0, gt=0, le=86400, description="Seconds an engine may take until it is ready."
    )
    revision: str = Field("", max_length=64, description="Revision of the source, for build_info; images set it.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe line to log.")
    log_format: Literal["text", "json"] = Field("text", description="Lines for people, or one JSON object per line.")
    tracing: Literal["off", "otlp"] = Field(
        "off", description="Send a span per request by OTLP over HTTP, to where the OTEL_* variables say."
    )
    log_prompts: Literal["off", "on"] = Field("off", description="Also log the text of every prompt.")

    @field_validator("speculative")
    @classmethod
    def _proposer(cls, value: str) -> str:
        if not PROPOSER.fullmatch(value):
            raise ValueError("must be none, auto or METHOD:K, for example mtp:3 or ngram:4")
        if ":" in value and int(value.partition(":")[2]) > MAX_DRAFTS:
            raise ValueError(f"at most {MAX_DRAFTS} drafted tokens are possible")
        return value

    @field_validator("api_key")
    @classmethod
    def _keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not key.strip() for key in value):
            raise ValueError("must not be empty")
        return value

    @property
    def model_path(self) -> Path:
        """The model directory, the embedded one by default."""
        return Path(self.model_dir) if self.model_dir else embedded_model_dir()

    @property
    def model_name(self) -> str:
        """The name clients use."""
        if self.served_model_name:
            return self.served_model_name
        return self.model_path.resolve().name if self.model_dir else EMBEDDED_NAME

    def resolved(self) -> Settings:
        """With `auto` replaced and the directory checked; raises ConfigError with one sentence."""
        path = self.model_path
        if not path.is_dir():
            raise ConfigError(f"The model directory {path} does not exist.")
        for name in ("config.json", "tokenizer.json"):
            if not (path / name).is_file():
                raise ConfigError(f"The model directory {path} has no {name}.")
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            heads = int({**config, **config.get("text_config", {})}.get("mtp_num_hidden_layers") or 0)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"{path / 'config.json'} is not a model configuration.") from error
        speculative = self.speculative
        if speculative == "auto":
            speculative = "mtp:3" if heads > 0 else "none"
        return self.model_copy(update={"speculative": speculative})

    @property
    def proposer(self) -> str:
        """The drafting method alone."""
        return self.speculative.partition(":")[0]

    @property
    def num_drafts(self) -> int:
        """Drafted tokens per verification of a request that does not say; call it on resolved settings."""
        return int(self.speculative.partition(":")[2] or 0)

    def engine_config(self) -> EngineConfig:
        """What the engine is told; call it on resolved settings."""
        return EngineConfig(
            model_dir=str(self.model_path.resolve()),
            speculative=self.speculative,
            prefill_backend=self.prefill_backend,
            decode_backend=self.decode_backend,
            speculative_attention_mode=self.speculative_attention_mode,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            priority_aging_tokens=self.priority_aging_tokens,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_slots=self.num_slots,
            prefix_cache=self.prefix_cache == "on",
            checkpoint_interval=self.checkpoint_interval,
            num_checkpoints=self.num_checkpoints,
            host_cache_gb=self.host_cache_gb,
            memory_gb=self.memory_gb,
            gpu_memory_utilization=self.gpu_memory_utilization,
            settle_lag=self.settle_lag,
            threads=self.threads,
            audit_interval=self.audit_interval,
            log_format=self.log_format,
        )


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What the engine process inherits: the same `runtime` wherever the command was typed, and no keys.

    Its compute threads sleep while they wait for each other. Spinning, OpenMP's default, makes a step twenty times
    slower as soon as anything else wants the CPU; set OMP_WAIT_POLICY to have it back.
    """
    root = str(Path(runtime.__path__[0]).parent)
    inherited = {name: value for name, value in environment.items() if name != ENV_PREFIX + "API_KEY"}
    inherited.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if root not in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        earlier = inherited.get("PYTHONPATH")
        inherited["PYTHONPATH"] = root + os.pathsep + earlier if earlier else root
    return inherited


class _Parser(argparse.ArgumentParser):
    """Errors are one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)


def flag_of(name: str) -> str:
    """`max_model_len` as `--max-model-len`."""
    return "--" + name.replace("_", "-")


def parser() -> argparse.ArgumentParser:
    """The command line, made from the fields."""
    command = _Parser(
        prog="lockstep serve",
        description="Serve a model over the OpenAI API.",
        epilog=f"Every flag is also an environment variable, {ENV_PREFIX}PORT for --port; a flag wins.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in Settings.model_fields.items():
        text = (field.description or "").replace("%", "%%")
        if name == "model_dir":
            command.add_argument(name, nargs="?", metavar="MODEL_DIR", help=text + " Default: the embedded model.")
            continue
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        if field.default not in ("", ()):
            text += f" Default: {field.default}."
        metavar = "{" + ",".join(choices) + "}" if choices else name.rpartition("_")[2].upper()
        action = "append" if get_origin(field.annotation) is tuple else "store"
        command.add_argument(flag_of(name), action=action, metavar=metavar, help=text)
    return command


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Values of `LOCKSTEP_*` variables; several keys are separated by commas."""
    values: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        text = environment.get(ENV_PREFIX + name.upper())
        if text is None or text == "":
            continue
        values[name] = text.split(",") if get_origin(field.annotation) is tuple else text
    return values


def refuse_groups(environment: Mapping[str, str]) -> None:
    """Raises ConfigError inside a process group of several, which a launcher announces by WORLD_SIZE."""
    size = environment.get("WORLD_SIZE", "")
    if size not in ("", "1"):
        raise ConfigError(f"WORLD_SIZE is {size[:16]}, but this version computes a replica in one process on one host.")


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags over environment over defaults. Raises ConfigError with one sentence; `--help` exits."""
    flags = vars(parser().parse_args(list(arguments)))
    refuse_groups(environment)
    try:
        return Settings.model_validate(from_environment(environment) | flags)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        origin = flag_of(name) if name in flags else ENV_PREFIX + name.upper()
        if name == "model_dir":
            origin = "MODEL_DIR"
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        shown = "" if name == "api_key" else f" (got {str(first['input'])[:64]!r})"
        must = reason if reason.startswith(("must", "at most")) else f"must be {reason}"
        raise ConfigError(f"{origin} {must}{shown}.") from error
