"""Other wordings of prompts: which there are, and wrong ones planted in zoo pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from planted_faults import PAIRS, configuration

from hydraspec.analysis.doctor import patient as patients
from hydraspec.analysis.doctor.patient import Patient, few, loaded
from hydraspec.analysis.doctor.prompts import gain_of_wording, wordings
from hydraspec.analysis.doctor.run import drafts_by_request, other_wordings
from hydraspec.analysis.doctor.scores import score
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.tokenizer import Tokenizer, load_tokenizer
from hydraspec.types import Request, SamplingParams, Span
from hydraspec.workloads import reading as workloads

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
NUM_PROMPTS = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(resolve_folder("zoo:tiny_qwen3"))
    assert found is not None
    return found


def asked(tokenizer: Tokenizer, *, plain: bool, template: str | None = None) -> list[Request]:
    text = "Sort these words: b a c"
    request = Request(index=0, id="0", sampling=SamplingParams())
    if plain:
        return [replace(request, prompt=text, prompt_token_ids=tokenizer.encode(text))]
    messages = [{"role": "user", "content": text}]
    used = tokenizer if template is None else tokenizer.with_template(template)
    return [replace(request, messages=messages, prompt_token_ids=used.encode_chat(messages))]


def test_wordings_are_those_the_tokenizer_knows(tokenizer: Tokenizer) -> None:
    """The zoo's own template is Gemma 4's, so it is tried once; forms without markers are not."""
    tried = [w.tried for w in wordings(asked(tokenizer, plain=False), tokenizer, None)]
    assert tried == ["no chat template", "without the BOS token at the start"]
    (first, *_) = wordings(asked(tokenizer, plain=True), tokenizer, None)
    assert first.tried == "the target's chat template"
    wrong = tokenizer.with_template(CHATML)
    tried = [w.tried for w in wordings(asked(wrong, plain=False), wrong, tokenizer)]
    assert tried[0] == "the chat template in the drafter's folder"
    assert "Gemma 4's chat template" not in tried  # the same tokens as the one before


def test_prompts_of_token_ids_have_no_other_wording(tokenizer: Tokenizer) -> None:
    request = Request(index=0, id="0", sampling=SamplingParams(), prompt_token_ids=[5, 6])
    assert list(wordings([request], tokenizer, None)) == []


def test_prompts_with_pictures_have_no_other_wording(tokenizer: Tokenizer) -> None:
    """Other tokens would leave spans at the wrong places; parts are no text that a form takes."""
    image = Span(kind="image", start=1, length=2, digest="aa", may_be_cut=True)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    (plain,) = asked(tokenizer, plain=False)
    for request in (replace(plain, spans=(image,)), replace(plain, messages=parts)):
        assert list(wordings([request], tokenizer, None)) == []


def test_requests_without_room_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers beyond MAX_ROWS counted as rejected drafts, which made the wording with the
    shorter prompts look better. A request that is hardly answered does count.
    """
    config = configuration("tiny_mistral", "eagle", "method.num_speculative_tokens=3")
    with loaded(config) as patient, torch.inference_mode():
        workload = workloads.read(config)
        assert workload is not None
        requests = few(workload.requests, 8)
        patient.engine.tokenize(requests)
        whole = patient.answers(requests)
        assert whole.texts is not None
        lengths = [len(text.token_ids) for text in whole.texts.texts]
        monkeypatch.setattr(patients, "MAX_ROWS", sum(lengths[:3]))
        cut = patient.answers(requests)
        assert cut.texts is not None
        kept = {text.index for text in cut.texts.texts}
        assert len(kept) == 3
        assert cut.left_out == {r.index for r in requests} - kept
        drafts = [
            drafts_by_request(each.texts, score(patient.trial(), each.texts, patient.k))
            for each in (whole, cut)
            if each.texts is not None
        ]
    assert gain_of_wording(*drafts, 1, cut.left_out).mean == pytest.approx(0, abs=1e-9)
    assert gain_of_wording({0: 2.0, 1: 2.0}, {0: 2.0}, 1).mean == 1.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("target", "method"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_wrong_wordings_are_named(target: str, method: str) -> None:
    """Plain text in place of messages, and ChatML in place of the zoo's turns; the right one has no
    better wording.
    """
    config = configuration(target, method, "method.num_speculative_tokens=3")
    with loaded(config) as patient, torch.inference_mode():
        workload = workloads.read(config)
        assert workload is not None
        chats = few(workload.requests, NUM_PROMPTS)
        plain = [replace(r, messages=None, prompt=r.messages[0]["content"]) for r in chats]  # type: ignore[index]
        own = patient.tokenizer
        assert own is not None
        assert named(patient, chats) is None
        assert named(patient, plain) == "the target's chat template"
        patient.tokenizer = patient.engine.parts.tokenizer = own.with_template(CHATML)
        assert named(patient, chats) == "Gemma 4's chat template"


def named(patient: Patient, requests: Sequence[Request]) -> str | None:
    """The wording that is called a cause, after figures are printed."""
    requests = [replace(r, prompt_token_ids=None) for r in requests]
    patient.engine.tokenize(requests)
    trial, answers = patient.trial(), patient.answers(requests)
    scores = None if answers.texts is None else score(trial, answers.texts, patient.k)
    (best, *_) = other_wordings(patient, requests, trial, None, (answers, scores))
    before = "nothing" if scores is None else f"{scores.acceptance:.2f}"
    after = "nothing" if best.scores is None else f"{best.scores.acceptance:.2f}"
    print(f"{before}; with {best.change.tried} {after}, gain {best.gain.mean:+.2f}")  # noqa: T201
    return best.change.tried if best.is_cause else None
