"""Other wordings of the workload's prompts: published chat templates, no template, and with or
without the BOS token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hydraspec.analysis.doctor.scores import Gain, gain
from hydraspec.analysis.doctor.variants import Change
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.types import Request, WorkloadError

MIN_GAIN = 0.1  # accepted drafts per start; the answers differ too, so less proves nothing


def _turns(start: str, end: str, *, model: str = "assistant", bos: bool = False) -> str:
    """A chat template that writes turns as <start>role\\ntext<end>; `model` names the answerer."""
    role = "{% set role = '" + model + "' if m['role'] == 'assistant' else m['role'] %}"
    turn = "{{ '" + start + "' + role + '\n' + (m['content'] | trim) + '" + end + "\n' }}"
    head = "{{ bos_token }}" if bos else ""
    opening = "{{ '" + start + model + "\n' }}"
    return head + "{% for m in messages %}" + role + turn + "{% endfor %}" + opening


_LLAMA3_TURN = (
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + (m['content'] | trim)"
    " + '<|eot_id|>' }}"
)
_LLAMA3_OPENING = "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
# Published forms by name: the marker that a tokenizer must know as one token, and the template.
FORMS = {
    "ChatML": ("<|im_start|>", _turns("<|im_start|>", "<|im_end|>")),
    "Gemma": (
        "<start_of_turn>",
        _turns("<start_of_turn>", "<end_of_turn>", model="model", bos=True),
    ),
    "Gemma 4": ("<|turn>", _turns("<|turn>", "<turn|>", model="model", bos=True)),
    "Llama 3": (
        "<|start_header_id|>",
        "{{ bos_token }}{% for m in messages %}" + _LLAMA3_TURN + "{% endfor %}" + _LLAMA3_OPENING,
    ),
    "Mistral": (
        "[INST]",
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ m['content'] + eos_token }}{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% endif %}{% endfor %}",
    ),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Wording(Change):
    """The same requests in another wording, tokenised."""

    cause: str = "chat_template"
    remedy: str = "write the workload's prompts so, or mend the template in the target's folder"
    requests: list[Request]


def wordings(
    requests: Sequence[Request], tokenizer: Tokenizer | None, drafters: Tokenizer | None
) -> Iterator[Wording]:
    """Other wordings of tokenised requests, without those that give the same tokens as another.
    Nothing for requests that were given as token ids, or have parts that are no text.

    tokenizer: the target's.
    drafters: the one in the drafter's folder; its template may be that of the drafter's training.
    """
    if tokenizer is None or any(r.messages is None and r.prompt is None for r in requests):
        return
    contents = [message["content"] for r in requests for message in r.messages or ()]
    if any(r.spans for r in requests) or not all(isinstance(each, str) for each in contents):
        return
    chats = requests[0].messages is not None
    says = "prompts go through the target's chat template" if chats else "prompts are plain text"
    seen = [[r.prompt_token_ids for r in requests]]
    for tried, encode in _encoders(tokenizer, drafters):
        try:
            ids = [encode(_messages(request)) for request in requests]
        except WorkloadError:
            continue
        if ids not in seen and all(ids):
            seen.append(ids)  # type: ignore[arg-type]
            yield _wording(says, tried, requests, ids)
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    now = [list(request.prompt_token_ids or []) for request in requests]
    has = all(ids[0] == bos for ids in now)
    tried = "without the BOS token at the start" if has else "with the BOS token at the start"
    other = [ids[1:] if has else [bos, *ids] for ids in now]
    if all(other) and other not in seen:
        yield _wording(says, tried, requests, other)


def _encoders(
    tokenizer: Tokenizer, drafters: Tokenizer | None
) -> Iterator[tuple[str, Callable[[list[dict[str, str]]], list[int]]]]:
    yield "the target's chat template", tokenizer.encode_chat
    if drafters is not None and drafters.chat_template is not None:
        theirs = tokenizer.with_template(drafters.chat_template)
        yield "the chat template in the drafter's folder", theirs.encode_chat
    for name, (marker, template) in FORMS.items():
        if tokenizer.knows(marker):
            yield f"{name}'s chat template", tokenizer.with_template(template).encode_chat
    yield "no chat template", lambda messages: tokenizer.encode(messages[-1]["content"])


def _messages(request: Request) -> list[dict[str, str]]:
    if request.messages is not None:
        return [dict(message) for message in request.messages]
    return [{"role": "user", "content": request.prompt or ""}]


def _wording(
    says: str, tried: str, requests: Sequence[Request], ids: Sequence[list[int]]
) -> Wording:
    pairs = zip(requests, ids, strict=True)
    return Wording(
        says=says, tried=tried, requests=[replace(r, prompt_token_ids=x) for r, x in pairs]
    )


def gain_of_wording(
    variant: Mapping[int, float],
    base: Mapping[int, float],
    num_compared: int,
    left_out: Collection[int] = (),
) -> Gain:
    """The difference in drafts accepted per start between two wordings, paired over requests;
    `variant` and `base` map a request's index to the mean over its answer. A request that a wording
    lacks was answered with at most one token there, and counts as no draft accepted. Requests in
    `left_out` are not compared: their answers were not read in one wording or the other.
    """
    requests = sorted({*variant, *base}.difference(left_out))
    theirs, ours = ([found.get(i, 0.0) for i in requests] for found in (variant, base))
    return gain(theirs, ours, (1,) * len(requests), num_compared=num_compared)
