"""The examination of a configured drafter: loads it, examines it, writes doctor.json and
doctor.html.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hydraspec.analysis.doctor import console, other_heads, page, words
from hydraspec.analysis.doctor.conclusion import Conclusion, conclude
from hydraspec.analysis.doctor.diagnosis import Tried
from hydraspec.analysis.doctor.expected import of_card
from hydraspec.analysis.doctor.patient import MAX_PROMPTS, Answers, Patient, few, loaded
from hydraspec.analysis.doctor.prompts import MIN_GAIN, Wording, gain_of_wording, wordings
from hydraspec.analysis.doctor.scores import Scores, score
from hydraspec.analysis.doctor.verdict import Judgement, evidence
from hydraspec.analysis.doctor.words import Files
from hydraspec.config import to_dict
from hydraspec.config.own_drafter import check_own_drafter
from hydraspec.config.schema import RunConfig
from hydraspec.errors import UserError
from hydraspec.lab import environment
from hydraspec.lab.folder import RunFolder
from hydraspec.metrics.counters import StepSums
from hydraspec.metrics.draft_figures import ChainPlaces, draft_share, figures
from hydraspec.metrics.files import Json, pretty_json, write_whole
from hydraspec.metrics.run_files import DOCTOR, DOCTOR_REPORT
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.signals import interrupts_stay_interrupts
from hydraspec.speculators.registry import SPECULATORS
from hydraspec.speculators.teacher_forcing.texts import Texts
from hydraspec.speculators.teacher_forcing.trial import Trial, can_be_forced
from hydraspec.types import Request, StepRecord, WorkloadError
from hydraspec.workloads import generated
from hydraspec.workloads import reading as workloads

log = logging.getLogger(__name__)

MAX_LISTED = 40  # variants of each round in doctor.json
TIMED_REQUESTS = 4  # of the run that measures the share of drafting
SCHEMA_VERSION = 2


@dataclass(slots=True, kw_only=True)
class Examination:
    """All results of an examination."""

    patient: Patient
    files: Files | None
    conclusion: Conclusion
    first: Scores | None  # prompts and drafter as configured; None: the target does not answer
    texts: Texts  # of the best wording
    prompted: list[Tried[Wording]]
    draft_share: float | None = None  # of a decode step's time

    @property
    def judgement(self) -> Judgement:
        """The judgement of the conclusion."""
        return self.conclusion.judgement

    @property
    def causes(self) -> list[Tried[Any]]:
        """The repairs to propose, in order: another wording of the prompts first, if it helps."""
        return [*(each for each in self.prompted[:1] if each.is_cause), *self.judgement.repairs]

    @property
    def acceptance(self) -> float | None:
        """Acceptance length with prompts and drafter as configured; None: the target does not
        answer.
        """
        return None if self.first is None else self.first.acceptance

    @property
    def verdict(self) -> str | None:
        """The verdict of the judgement; "convention" also if only the wording of the prompts is
        wrong.
        """
        return "convention" if self.causes else self.judgement.verdict


@interrupts_stay_interrupts()
def examine(
    config: RunConfig, *, run_dir: Path, overrides: Sequence[str], quiet: bool = False
) -> Json:
    """Examine the drafter of a resolved configuration, write doctor.json and doctor.html to
    `run_dir`, and print the result. Returns the content of doctor.json.

    Raises:
        ConfigurationError: the method has no weights, or engine or parallelism are not supported.
        CheckpointError: a checkpoint cannot be loaded.
        WorkloadError: the workload cannot be read, or the target answers none of its prompts.
    """
    check(config)
    folder = RunFolder(run_dir, to_dict(config), overrides)
    workload = workloads.read(config)
    with loaded(config) as patient, torch.no_grad():  # inference mode forbids training parts
        warnings = []
        if workload is None:
            workload = generated.random_requests(config, patient.target.vocab_size)
            source = f"workload={config.workload.name}"
            warnings.append(generated.random_text_warning(source, generated.REAL_TEXT))
            log.warning(warnings[0])
        patient.engine.tokenize(workload.requests)
        count = len(workload.requests) if config.workload.limit else MAX_PROMPTS
        folder.replace_older_run()
        folder.write_environment(environment.describe(patient.engine.info))
        firsts = [r for r in workload.requests if r.after is None]  # first turns
        result = _result(patient, few(firsts, count), quiet=quiet) | {"warnings": warnings}
    write_whole(folder.path / DOCTOR, pretty_json(result))
    write_whole(folder.path / DOCTOR_REPORT, page.page_of(result))
    console.show(result, folder.path / DOCTOR, quiet=quiet)
    return result


def check(config: RunConfig) -> None:
    """Check that the doctor supports a configuration, before anything is loaded.

    Raises:
        ConfigurationError: method, engine or parallelism cannot be examined; it names the key.
    """
    check_own_drafter(
        config,
        verb="examined",
        none=("has no drafter to examine", "give method=… and method.checkpoint=…"),
        engine="variants are tried in our own draft heads",
        ranks="leave parallelism out, and take a smaller target of the same family if it does not "
        "fit one device",
    )


def _result(patient: Patient, requests: Sequence[Request], *, quiet: bool) -> Json:
    """The content of doctor.json. If a head is none that drafts can be teacher-forced with, or
    examining another package's drafter raises an error, its content is what can be told without
    changing the head (other_heads).
    """
    method = patient.config.method
    name, is_ours = method.name, method.name in SPECULATORS
    if not method.needs_checkpoint:
        reason = f"method={name} has no weights"
    elif is_ours and not can_be_forced(patient.speculator):
        reason = f"heads of method={name} do not draft from given tokens and states"
    else:
        try:
            return as_json(_examined(patient, requests, console.progress(quiet=quiet)))
        except UserError:
            raise
        except Exception as error:
            if is_ours:
                raise
            reason = f"method={name} lacks what that needs ({type(error).__name__}: {error})"
    found = other_heads.as_json(patient, requests, reason)
    share = _draft_share(patient, requests)
    return {"schema_version": SCHEMA_VERSION, **found, "draft_share_of_step": share}


def _examined(
    patient: Patient, requests: Sequence[Request], on_variant: Callable[[int, int], None]
) -> Examination:
    files = None
    checkpoint = patient.config.method.checkpoint or patient.config.target.checkpoint
    if patient.config.method.weights.value == "checkpoint":
        files = words.files_of(checkpoint, patient.speculator.head)
    answers = patient.answers(requests)
    texts, trial = answers.texts, patient.trial()
    first = None if texts is None else score(trial, texts, patient.k)
    drafters = None if files is None else files.tokenizer
    prompted = other_wordings(patient, requests, trial, drafters, (answers, first))
    if prompted and prompted[0].is_cause:
        texts = patient.texts(prompted[0].change.requests)
    if texts is None:
        raise WorkloadError(
            "workload: the target answers none of its prompts with two tokens or more, so there is "
            "nothing to draft; give prompts that it answers, through its chat template (messages)"
        )
    expected = None if files is None else of_card(Path(files.folder), patient.k)
    return Examination(
        patient=patient,
        files=files,
        conclusion=conclude(patient, trial, texts, expected=expected, on_variant=on_variant),
        first=first,
        texts=texts,
        prompted=prompted,
        draft_share=_draft_share(patient, requests),
    )


def other_wordings(
    patient: Patient,
    requests: Sequence[Request],
    trial: Trial,
    drafters: Tokenizer | None,
    now: tuple[Answers, Scores | None],
) -> list[Tried[Wording]]:
    """Other wordings of tokenised requests, compared with the configured one, the best first.

    `drafters` is the tokenizer in the drafter's folder; `now` are the target's answers to the
    requests as configured, and the drafter's scores on them.
    """
    found = []
    others = list(wordings(requests, patient.tokenizer, drafters))
    before, base = now
    for wording in others:
        answers = patient.answers(wording.requests)
        texts = answers.texts
        scores = None if texts is None else score(trial, texts, patient.k)
        gained = gain_of_wording(
            drafts_by_request(texts, scores),
            drafts_by_request(before.texts, base),
            len(others),
            answers.left_out | before.left_out,
        )
        is_cause = gained.is_sure and gained.mean >= MIN_GAIN
        found.append(Tried(change=wording, scores=scores, gain=gained, is_cause=is_cause))
    return sorted(found, key=lambda each: -each.gain.mean)


def drafts_by_request(texts: Texts | None, scores: Scores | None) -> dict[int, float]:
    """Mean number of drafts accepted per start in the answer to each request, by its index."""
    if texts is None or scores is None:
        return {}
    found, first = {}, 0
    for text, count in zip(texts.texts, scores.num_of, strict=True):
        found[text.index] = float(scores.accepted[first : first + count].mean())
        first += count
    return found


def _draft_share(patient: Patient, requests: Sequence[Request]) -> float | None:
    """Drafting's share of the time of a decode step, 0 to 1, from a short run."""
    few_requests = [replace(r, arrival_s=None) for r in requests[:TIMED_REQUESTS]]
    phases: Mapping[str, float | None] | None = patient.engine.profile_phases(few_requests)
    if phases is None:
        sums = StepSums()
        for event in patient.engine.run(few_requests, concurrency=1):
            if isinstance(event, StepRecord) and not any(r.is_prefill for r in event.requests):
                sums.add(event)
        phases = sums.time_breakdown_ms()
    return draft_share(phases)


# ------------------------------------------------------------------ doctor.json


def as_json(found: Examination) -> Json:
    """The content of doctor.json; docs/doctor.md explains its keys."""
    patient, diagnosis = found.patient, found.conclusion.diagnosis
    expected = found.conclusion.expected
    spec, files = patient.spec, found.files
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": found.verdict,
        "sentence": verdict(found),
        "cause": next((tried.change.cause for tried in found.causes), None),
        "module": found.judgement.damage.module if found.verdict == "weights" else None,
        "evidence": evidence(found.judgement.damage),
        "expected_acceptance_length": None if expected is None else expected.acceptance_length,
        "expected_by": None if expected is None else expected.source,
        "target": patient.config.target.name,
        "method": patient.config.method.name,
        "drafter": patient.config.method.checkpoint or patient.config.target.checkpoint,
        "num_speculative_tokens": patient.k,
        "num_texts": len(found.texts.texts),
        "num_starts": found.texts.chains.count,
        "acceptance": found.acceptance,
        "best_acceptance": diagnosis.best.acceptance,
        "causes": causes(found),
        "drafter_in_words": words.sentences(spec, files),
        "draft_spec": asdict(spec),
        "tensors": None
        if files is None
        else {"expected": files.expected, "read": files.read, "unread": files.unread},
        "prompts": [_row(each) for each in found.prompted],
        "rounds": [[_row(each) for each in round_[:MAX_LISTED]] for round_ in diagnosis.rounds],
        "figures": _figures(diagnosis.base, found.texts, patient.tokenizer),
        "draft_share_of_step": found.draft_share,
    }


def causes(found: Examination) -> list[Json]:
    """The `causes` of doctor.json: repairs in order, each with the acceptance length before it."""
    rows, before = [], found.acceptance
    for tried in found.causes:
        rows.append({**_row(tried), "acceptance_before": before})
        before = rows[-1]["acceptance"]
    return rows


def verdict(found: Examination) -> str:
    """The verdict in words: a sentence for each repair, or one sentence if there is none."""
    if found.causes:
        return " ".join(_sentence(row) for row in causes(found))
    if found.verdict is None:
        return (
            f"Cannot tell: {len(found.texts.texts)} prompts have answers to draft, and an interval "
            "needs 5: give more prompts."
        )
    return found.conclusion.words


def _sentence(row: Json) -> str:
    before, after = row["acceptance_before"], row["acceptance"]
    now = "the target does not answer" if before is None else f"acceptance is {before:.2f}"
    sentence = f"As configured, {row['says']}; {now}. "
    sentence += f"With {row['tried']} it is {after:.2f}"
    low, high = row["gain_interval"]
    sentence += f" ({row['gain']:+.2f} drafts a start, {low:+.2f} to {high:+.2f})."
    if row.get("nats") is not None and low <= 0:
        sentence += f" The target's tokens are likelier so ({row['nats']:+.2f} nats)."
    return sentence


def _row(tried: Tried[Any]) -> Json:
    change, gained, nats = tried.change, tried.gain, tried.nats
    return {
        "cause": change.cause,
        "says": change.says,
        "tried": change.tried,
        "remedy": change.remedy,
        "acceptance": None if tried.scores is None else tried.scores.acceptance,
        "gain": gained.mean,
        "gain_interval": [gained.low, gained.high],
        "nats": None if nats is None else nats.mean,
        "nats_interval": None if nats is None else [nats.low, nats.high],
        "is_cause": tried.is_cause,
    }


def _figures(scores: Scores, texts: Texts, tokenizer: Tokenizer | None) -> Json:
    """The `figures` of doctor.json: acceptance by draft step, place, context length and token
    class.
    """
    chains = texts.chains
    places = ChainPlaces(
        output_place=np.concatenate([np.arange(1, n + 1) for n in chains.num_of if n]),
        context=chains.position.cpu().numpy() + 2,
        entropy=texts.target.entropy[chains.row + 1].double().cpu().numpy(),
        token=chains.truth[:, 0].cpu().numpy(),
    )
    return figures(scores, places, None if tokenizer is None else tokenizer.decode)
