"""A judge behind an OpenAI-compatible API (vLLM, SGLang, llama.cpp's server, a hosted model).

Asks `POST {url}/chat/completions` for a few tokens with log-probs; where a server gives none, the first option in its text
counts as certain. A request that fails is tried once more; a question that failed twice has no answer, and when all have
none that is an error.
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TRIES = 2
REPLY_BYTES_MAX = 1 << 20
TOKENS_MAX = 8  # room for blanks or a mark before the answer
TOP_LOGPROBS = 20  # the API's maximum


class ServerReader:
    """Asks one server, several questions at once."""

    def __init__(
        self, url: str, model: str, *, key: str = "", at_once: int = 16, timeout_seconds: float = 30.0
    ) -> None:
        """
        Args:
            url: where the API begins, such as http://127.0.0.1:8000/v1.
            key: sent as a bearer token; empty sends none.
        """
        self._url, self._model, self._key = url.rstrip("/") + "/chat/completions", model, key
        self._timeout_seconds = timeout_seconds
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="judge")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def probabilities(self, questions: Sequence[str], options: Sequence[str]) -> list[list[float] | None]:
        """Raises RuntimeError when not one question was answered."""
        results = list(self._pool.map(lambda question: self._ask(question, options), questions))
        errors = [result for result in results if isinstance(result, str)]
        if errors and len(errors) == len(results):
            raise RuntimeError(f"{self._url}: {errors[0]}")
        return [None if isinstance(result, str) else result for result in results]

    def _ask(self, question: str, options: Sequence[str]) -> list[float] | None | str:
        """The odds, None without an answer in the reply, or the error as text."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": TOKENS_MAX,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
        }
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        error = ""
        for _ in range(TRIES):
            try:
                with _OPENER.open(request, timeout=self._timeout_seconds) as reply:
                    return odds_in(json.loads(reply.read(REPLY_BYTES_MAX)), options)
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as failed:  # network, JSON, its shape
                error = f"{type(failed).__name__}: {failed}"
                if isinstance(failed, urllib.error.HTTPError) and failed.code < 500 and failed.code != 429:
                    break  # it would say the same again
        return error


def odds_in(reply: dict[str, Any], options: Sequence[str]) -> list[float] | None:
    """The odds of the options at the first token that is one of them, or 1 for the first option in the text.

    Raises LookupError, TypeError or AttributeError for a reply of another shape.
    """
    choice = reply["choices"][0]
    for token in (choice.get("logprobs") or {}).get("content") or ():
        if token["token"].strip() in options:
            found = dict.fromkeys(options, 0.0)
            for top in token.get("top_logprobs") or [token]:
                if (option := top["token"].strip()) in found:
                    found[option] += math.exp(min(0.0, float(top["logprob"])))
            total = math.fsum(found.values())
            return [p / total for p in found.values()] if total > 0 else None
    text = choice["message"]["content"] or ""
    first = re.search(r"\b(" + "|".join(map(re.escape, options)) + r")\b", text)
    return None if first is None else [float(option == first[1]) for option in options]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could take the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
