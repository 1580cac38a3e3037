"""Grammars of outputs: compiled by xgrammar for the target's tokenizer, and followed by each
request along its tokens and along the drafts of a step (docs/adr/0051).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from hydraspec.config.schema import RunConfig, Verification
from hydraspec.config.structured import as_structured, by_kind
from hydraspec.engine.json_schemas import has_inner_anchor, not_enforced
from hydraspec.engine.prompts import refuse_sampling
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.sampling.rules import num_words
from hydraspec.types import ConfigurationError, Request, SamplingParams, Structured, WorkloadError

MAX_TEXT = 64  # characters of a text that has to come next, of which one token is taken
MAX_TEXTS = 1 << 12  # that grammars leave no choice about, whose tokens are kept
MAX_WHITESPACE = 1  # character between two parts of a JSON text; models would fill more room
NOT_INSTALLED = (
    "sampling.structured needs the package xgrammar, which is not installed\n"
    "  allowed: null\n  to do: pip install 'hydraspec[grammar]', or leave the key out"
)


NO_TOKEN = (
    "no token of the target's vocabulary can follow: the grammar of sampling.structured goes on "
    "where its tokenizer, or an end of sequence, does not: mend the grammar"
)


@dataclass(slots=True)
class GrammarCosts:
    """Time of the host for grammars, since the engine was loaded."""

    compile_ms: list[float] = field(default_factory=list)  # of each grammar
    mask_ms: float = 0.0
    num_masks: int = 0  # rows of tokens that are allowed or not

    def as_json(self) -> dict[str, float | int | None]:
        """The costs as the summary has them."""
        return {
            "num_grammars": len(self.compile_ms),
            "compile_ms": sum(self.compile_ms),
            "longest_compile_ms": max(self.compile_ms, default=None),
            "num_masks": self.num_masks,
            "mask_ms": self.mask_ms,
        }


@dataclass(slots=True, frozen=True)
class FollowedDrafts:
    """A grammar along the N drafts of a request's step."""

    # [N + 1, ceil(V / 32)] int32 of the tokens that are allowed after none of the drafts, the first
    # one, and so on. After a draft that is none or that the grammar forbids, where nothing is
    # accepted, and where the grammar leaves no token, all are allowed.
    masks: np.ndarray
    drafts: list[int]  # N; those of the drafter, but at the places that the grammar decides
    decided: list[int]  # places, rising


class Grammars:
    """Compiles each grammar of an engine's requests once."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Seq[int]
    ) -> None:
        """vocab_size: the width of the target's logits."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: dict[Structured, Any] = {}
        self._tokens_of = lru_cache(MAX_TEXTS)(self._encode)
        self.costs = GrammarCosts()

    def check(self, requests: Seq[Request], config: RunConfig) -> None:
        """Compile the grammars of requests, and note which may reason first.

        Raises:
            ConfigurationError: xgrammar is not installed, or the configuration's grammar is none.
            WorkloadError: naming the request; the checkpoint has no tokenizer, the configuration
            accepts any draft, or a grammar cannot be compiled or would not be followed in full.
        """
        configured = as_structured(by_kind(config.sampling.structured))
        if config.method.verification is Verification.synthetic:
            refuse_sampling(requests, {"structured": "verification=synthetic accepts any draft"})
        for request in requests:
            structured = request.sampling.structured
            if structured is None:
                continue
            request.may_reason = request.messages is not None and request.thinking is not False
            if self._tokenizer is None:
                raise WorkloadError(
                    f"request {request.id}: sampling.structured needs a tokenizer, and the "
                    "target's checkpoint has none: leave the key out, or add its files",
                    request_id=request.id,
                )
            try:
                self._compile(structured)
            except _GrammarError as error:
                key, shown = f"sampling.structured.{structured.kind}", _short(structured.text)
                if structured == configured:
                    raise ConfigurationError(
                        f"{key}={shown} cannot be followed: {error}\n"
                        f"  allowed: {ALLOWED[structured.kind]}\n"
                        "  to do: mend it, or leave the key out",
                        key=key,
                    ) from None
                raise WorkloadError(
                    f"request {request.id}: {key}: {shown} cannot be followed: {error}; allowed is "
                    f"{ALLOWED[structured.kind]}",
                    request_id=request.id,
                ) from None

    def of(self, request: Request) -> RequestGrammar | None:
        """The grammar of a request from its first output token on; None: it has none."""
        structured = request.sampling.structured
        if structured is None:
            return None
        matcher = _xgrammar().GrammarMatcher(self._compile(structured))
        assert self._tokenizer is not None
        markers = self._tokenizer.reasoning_markers if request.may_reason else None
        found = RequestGrammar(matcher, self._vocab_size, self.costs, self._tokens_of, markers)
        if markers is not None:
            found.start_after(self._tokenizer.reasoning_at_end(request.prompt_token_ids or []))
        return found

    def allowed_after(
        self, sampling: SamplingParams, token_ids: Seq[int], num_prompt: int
    ) -> np.ndarray | None:
        """Tokens [V] (bool) that a request's grammar allows after `token_ids`, of which the first
        num_prompt are its prompt; None: it has no grammar."""
        prompt, output = list(token_ids[:num_prompt]), token_ids[num_prompt:]
        asked = Request(index=0, id="", sampling=sampling, prompt_token_ids=prompt, may_reason=True)
        grammar = self.of(asked)
        if grammar is None:
            return None
        grammar.accept(list(output))
        words = grammar.follow([]).masks[0].view(np.uint8)
        return np.unpackbits(words, bitorder="little")[: self._vocab_size].astype(bool)

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode_within(text)

    def _compile(self, structured: Structured) -> Any:
        if structured not in self._compiled:
            compiler, start = self._compiler, time.perf_counter()
            self._compiled[structured] = _compiled(compiler, structured)
            self.costs.compile_ms.append((time.perf_counter() - start) * 1e3)
        return self._compiled[structured]

    @cached_property
    def _compiler(self) -> Any:
        xgrammar = _xgrammar()
        assert self._tokenizer is not None
        size, stops = self._vocab_size, self._eos_token_ids
        info = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.inner, vocab_size=size, stop_token_ids=stops
        )
        special = self._tokenizer.special_token_ids
        # A token without text is never allowed but as a stop.
        texts = [b"" if i in special else text for i, text in enumerate(info.decoded_vocab)]
        info = xgrammar.TokenizerInfo(
            texts,
            vocab_size=size,
            stop_token_ids=stops,
            add_prefix_space=info.add_prefix_space,
        )
        return xgrammar.GrammarCompiler(info, max_threads=torch.get_num_threads())


class RequestGrammar:
    """The grammar of one request after the tokens that its results have brought.

    A reasoning section, from one marker to the other, is free text; with markers the first token
    may begin one. After the end-of-sequence token anything is allowed.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        costs: GrammarCosts,
        tokens_of: Callable[[str], list[int]],
        markers: tuple[int, int] | None = None,
    ) -> None:
        """tokens_of: the tokenizer, without special tokens."""
        self._matcher, self._vocab_size, self._costs = matcher, vocab_size, costs
        self._tokens_of = tokens_of
        self._markers = markers
        self._may_begin = markers is not None  # a reasoning section, with the next token
        self._is_reasoning = False

    def start_after(self, is_open: bool | None) -> None:
        """Begin after a prompt, at whose end a reasoning section is open, closed (False) or none
        is (None): there the first token may begin one."""
        self._is_reasoning, self._may_begin = bool(is_open), is_open is None

    def accept(self, tokens: list[int]) -> list[int]:
        """Follow the tokens of a step; returns those up to one that the grammar forbids, which
        masks let through only where no token is allowed."""
        for count, token in enumerate(tokens):
            if self._follow(token) is None:
                return tokens[:count]
        return tokens

    def follow(self, drafts: Seq[int]) -> FollowedDrafts:
        """Go along the drafts of a step, and back. Where the grammar leaves one token, or one text
        of several tokens, the draft is that token, or the text's first one: whatever the drafter
        proposes, so that verification stays lossless (docs/adr/0051)."""
        start = time.perf_counter()
        words = np.full((len(drafts) + 1, num_words(self._vocab_size)), -1, dtype=np.int32)
        state, num_matched = (self._may_begin, self._is_reasoning), 0
        chosen, decided = list(drafts), list[int]()
        self._fill(words, 0)
        for place, draft in enumerate(drafts):
            matched, token = None, self._decided_token(words[place])
            if token is not None and (matched := self._follow(token)) is not None:
                chosen[place] = token
                decided.append(place)
            elif draft >= 0:
                matched = self._follow(draft)
            if matched is None:
                break
            num_matched += matched
            self._fill(words, place + 1)
        if num_matched:
            self._matcher.rollback(num_matched)
        self._may_begin, self._is_reasoning = state
        self._costs.mask_ms += (time.perf_counter() - start) * 1e3
        self._costs.num_masks += len(words)
        return FollowedDrafts(words, chosen, decided)

    def _decided_token(self, words: np.ndarray) -> int | None:
        """The only token of those allowed [ceil(V / 32)] (int32), or the first one of the text that
        has to come next; None: there is a choice. The last token of a text may be a longer one."""
        if self._is_reasoning or self._may_begin or self._matcher.is_terminated():
            return None
        if np.count_nonzero(words) == 1:
            (place,) = np.flatnonzero(words).tolist()
            word = int(words[place]) & 0xFFFFFFFF
            if word.bit_count() == 1:
                return 32 * place + word.bit_length() - 1
        text = self._matcher.find_jump_forward_string()[:MAX_TEXT]
        tokens = self._tokens_of(text) if text else []
        return tokens[0] if len(tokens) > 1 else None

    def _fill(self, words: np.ndarray, place: int) -> None:
        if self._is_reasoning or self._matcher.is_terminated():
            return
        self._matcher.fill_next_token_bitmask(words, place)
        if self._may_begin and self._markers is not None:
            word, bit = divmod(self._markers[0], 32)
            words[place].view(np.uint32)[word] |= np.uint32(1 << bit)
        if not words[place].any():
            words[place] = -1

    def _follow(self, token: int) -> int | None:
        """Go on by a token; returns by how many tokens the matcher went on, None: it is not
        allowed."""
        markers, began = self._markers, self._may_begin
        if self._is_reasoning:
            self._is_reasoning = markers is not None and token != markers[1]
            return 0
        self._may_begin = False
        if began and markers is not None and token == markers[0]:
            self._is_reasoning = True
            return 0
        if self._matcher.is_terminated():
            return 0
        return 1 if self._matcher.accept_token(token) else None


class _GrammarError(Exception):
    """A grammar that cannot be compiled or followed in full."""


ALLOWED = {
    "json": "a JSON schema",
    "regex": "a regular expression without look-around and back references",
    "grammar": "EBNF in the form of GBNF, whose first rule is root",
    "choice": "a list of different strings",
}


def _compiled(compiler: Any, structured: Structured) -> Any:
    kind, text = structured.kind, structured.text
    if kind == "json" and (why := not_enforced(json.loads(text))):
        raise _GrammarError(why)
    if kind == "regex" and has_inner_anchor(text):
        raise _GrammarError("^ and $ are not followed within a regular expression")
    try:
        if kind == "json":
            return compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
        if kind == "regex":
            return compiler.compile_regex(text)
        return compiler.compile_grammar(_choices(text) if kind == "choice" else text)
    except Exception as error:  # the library raises RuntimeError, and its own kinds
        message = str(error).partition(": ")[2] if str(error).startswith("[") else str(error)
        raise _GrammarError(" ".join(message.split())) from None


def _choices(text: str) -> str:
    """EBNF of a JSON list of strings."""
    return "root ::= " + " | ".join(json.dumps(each) for each in json.loads(text))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError:
        raise ConfigurationError(NOT_INSTALLED, key="sampling.structured") from None
    return xgrammar
