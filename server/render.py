"""Pieces to OpenAI objects: chat and legacy completions, as chunks and as whole responses, from the same pieces."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from server.answer import Piece, TokenText, Usage
from server.job import Job
from server.tokenizer import TextTokenizer

LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """A log-probability JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def usage_body(usage: Usage, *, details: bool) -> dict[str, Any]:
    """The usage object; the speculation extension only for those who asked."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    if details:
        body["speculation"] = {
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
        }
    return body


def merged(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """All pieces of each choice as one."""
    whole = [Piece(index) for index in range(count)]
    for piece in pieces:
        target = whole[piece.index]
        target.text += piece.text
        target.tokens += piece.tokens
        target.logprobs += piece.logprobs
        target.finish = piece.finish or target.finish
    return whole


class Renderer(Protocol):
    """How one route looks on the wire."""

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any text."""

    @abstractmethod
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One piece as a chunk."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage."""

    @abstractmethod
    def body(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The whole response."""


class ChatRenderer(Renderer):
    """chat.completion and chat.completion.chunk."""

    def __init__(self, job: Job, tokenizer: TextTokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer

    def opening(self) -> list[dict[str, Any]]:
        """The role of every choice."""
        chunks = []
        for index in range(len(self._job.requests)):
            choice: dict[str, Any] = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            if self._job.fields.return_token_ids:
                choice["prompt_token_ids"] = list(self._job.requests[index].prompt)
                choice["token_ids"] = []
            chunks.append(self._chunk([choice]))
        return chunks

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """See `Renderer`."""
        choice: dict[str, Any] = {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text or piece.finish is None else {},
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": piece.finish,
        }
        if self._job.fields.return_token_ids:
            choice["token_ids"] = piece.tokens
        return self._chunk([choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """See `Renderer`."""
        details = self._job.fields.return_speculation_details
        return self._chunk([]) | {"usage": usage_body(usage, details=details)}

    def body(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """See `Renderer`."""
        job = self._job
        choices = []
        for piece in merged(pieces, len(job.requests)):
            choice: dict[str, Any] = {
                "index": piece.index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": self._logprobs(piece.logprobs),
                "finish_reason": piece.finish,
            }
            if job.fields.return_token_ids:
                choice["prompt_token_ids"] = list(job.requests[piece.index].prompt)
                choice["token_ids"] = piece.tokens
            choices.append(choice)
        return {
            "id": job.id,
            "object": "chat.completion",
            "created": job.created,
            "model": job.model,
            "choices": choices,
            "usage": usage_body(usage, details=job.fields.return_speculation_details),
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job = self._job
        chunk: dict[str, Any] = {
            "id": job.id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": job.model,
            "choices": choices,
        }
        if job.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if self._job.fields.top_logprobs_wanted is None:
            return None
        content = []
        for token in tokens:
            entry = self._token(token.logprobs.token, token.logprobs.logprob)
            entry["top_logprobs"] = [self._token(id_, logprob) for id_, logprob in token.logprobs.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _token(self, id_: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.piece_bytes(id_)
        return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


class CompletionRenderer(Renderer):
    """text_completion, for chunks and whole responses alike."""

    def __init__(self, job: Job, tokenizer: TextTokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._introduced: set[int] = set()

    def opening(self) -> list[dict[str, Any]]:
        """Nothing: the first text is the first chunk."""
        return []

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """See `Renderer`. A choice's first chunk also carries its prompt ids, when asked for."""
        chunk = self._object([self._choice(piece, prompt=piece.index not in self._introduced)])
        self._introduced.add(piece.index)
        if self._job.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """See `Renderer`."""
        return self._with_usage([], usage)

    def body(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """See `Renderer`."""
        whole = merged(pieces, len(self._job.requests))
        return self._with_usage([self._choice(piece, prompt=True) for piece in whole], usage)

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job = self._job
        return {
            "id": job.id,
            "object": "text_completion",
            "created": job.created,
            "model": job.model,
            "choices": choices,
        }

    def _with_usage(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        details = self._job.fields.return_speculation_details
        return self._object(choices) | {"usage": usage_body(usage, details=details)}

    def _choice(self, piece: Piece, *, prompt: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": piece.finish,
        }
        if self._job.fields.return_token_ids:
            if prompt:
                choice["prompt_token_ids"] = list(self._job.requests[piece.index].prompt)
            choice["token_ids"] = piece.tokens
        return choice

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if self._job.fields.top_logprobs_wanted is None:
            return None
        tops = []
        for token in tokens:
            pairs = [*token.logprobs.top, (token.logprobs.token, token.logprobs.logprob)]
            tops.append({self._name(id_): finite(logprob) for id_, logprob in pairs})
        return {
            "tokens": [self._name(token.logprobs.token) for token in tokens],
            "token_logprobs": [finite(token.logprobs.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.offset for token in tokens],
        }

    def _name(self, id_: int) -> str:
        """A token's text; bytes that are no text are spelled out, so that different tokens stay different keys."""
        data = self._tokenizer.piece_bytes(id_)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
