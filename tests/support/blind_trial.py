"""A blind trial of the doctor: faults drawn by chance in every drafter of the zoo, the truth of
each measured on other prompts, and the verdict without and with a model card.

    python tests/support/blind_trial.py --seed auto --jobs 2 --out outputs/blind.jsonl

`auto` is the hash of the last commit that touches the doctor. Rows are written as they are found;
the same command goes on where it was cut, and prints the table of what there is.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from blind_table import show
from drawn_conventions import draw_convention
from drawn_faults import Files, draw_weight_fault
from drawn_heads import HARMLESS_A_ROUND, draw_harmless, draw_undertrained
from planted_faults import PAIRS, configuration

from hydraspec.analysis.doctor.conclusion import Conclusion, conclude
from hydraspec.analysis.doctor.expected import Expected
from hydraspec.analysis.doctor.parts import module_of
from hydraspec.analysis.doctor.patient import Patient, few, loaded
from hydraspec.analysis.doctor.scores import score
from hydraspec.analysis.doctor.verdict import judge
from hydraspec.errors import UserError
from hydraspec.models.checkpoint.mistral_names import hugging_face_name
from hydraspec.speculators import registry
from hydraspec.speculators.teacher_forcing.texts import Texts
from hydraspec.speculators.teacher_forcing.trial import Trial
from hydraspec.workloads import reading as workloads

DOCTOR = "hydraspec/analysis/doctor"
K, NUM_PROMPTS = 3, 32
HARMFUL = 0.1  # of the healthy acceptance length
QUOTAS = {
    "convention": 3,
    "weights": 4,
    "weak": 1,
    "harmless": HARMLESS_A_ROUND,
}  # of each drafter in a round
ROUNDS = 2
MOST_DRAWS = 6  # times the quota
Row = dict[str, Any]


@dataclass(slots=True)
class Ward:
    """A healthy pair: the doctor's texts, and others on which the truth is measured."""

    patient: Patient
    texts: Texts
    others: Texts
    healthy: float  # acceptance length on the others
    card: Expected  # the same on the doctor's texts

    def trial(self, folder: Path) -> tuple[Patient, Trial]:
        """The drafter of a folder in place of the healthy one."""
        config = self.patient.config
        config = replace(config, method=replace(config.method, checkpoint=str(folder)))
        speculator: Any = registry.build_speculator(config)
        speculator.load(self.patient.target)
        patient = replace(self.patient, speculator=speculator, config=config)
        return patient, patient.trial()


@contextmanager
def ward(target: str, method: str) -> Iterator[Ward]:
    """A pair, loaded."""
    config = configuration(target, method, f"method.num_speculative_tokens={K}")
    with loaded(config) as patient, torch.no_grad():
        workload = workloads.read(config)
        assert workload is not None
        patient.engine.tokenize(workload.requests)
        first = few(workload.requests, NUM_PROMPTS)
        rest = [r for r in workload.requests if r not in first]
        texts, others = patient.texts(first), patient.texts(rest)
        assert texts is not None
        assert others is not None
        healthy = score(patient.trial(), others, K).acceptance
        card = Expected(score(patient.trial(), texts, K).acceptance, "a card says")
        yield Ward(patient, texts, others, healthy, card)


# ------------------------------------------------------------------ one draw


def drawn(place: Ward, family: str, folder: Path, seed: tuple[int, ...]) -> tuple[Row, Any]:
    """A fault written to a folder: what it is, and how the head is fed if files cannot say it."""
    config = place.patient.config
    checkpoint = str(config.method.checkpoint or config.target.checkpoint)
    files = Files.of(checkpoint)
    drafter = checkpoint.removeprefix("zoo:")
    drafter += "-mtp" if config.method.name == "mtp" else ""
    if family == "convention":
        turned = draw_convention(files, config.method.name, seed)
        files.write(folder)
        return {"says": turned.says, "causes": turned.causes}, turned.fed
    if family == "weights":
        damage = draw_weight_fault(files, seed)
        files.write(folder)
        row: Row = {"says": f"{', '.join(damage.names)}: {damage.says}"}
        row["names"] = [hugging_face_name(name).removeprefix("model.") for name in damage.names]
        row["modules"] = sorted({module(name) for name in damage.names})
        row["causes"] = equal_conventions(damage.names)
        return row, None
    draw = draw_undertrained if family == "weak" else draw_harmless
    return {"says": draw(files, drafter, folder, seed)}, None


def module(name: str) -> str:
    """The part of a head that a tensor belongs to. The final norm and what reads it are one."""
    name = hugging_face_name(name)
    is_tied = name.startswith("model.embed_tokens")  # an assistant's output projection
    found = module_of(name.removeprefix("model."))
    return "lm_head" if is_tied or found in ("norm", "post_projection") else found


def equal_conventions(names: tuple[str, ...]) -> tuple[str, ...]:
    """Causes that name an exchange of two weights as rightly."""
    pair = {name.rsplit(".", 2)[-2] for name in names}
    return ("gate_order",) if pair in ({"gate_proj", "up_proj"}, {"w1", "w3"}) else ()


def judged(place: Ward, family: str, seed: tuple[int, ...], folder: Path) -> Row:
    """A draw, its truth and the doctor's verdicts."""
    row, fed = drawn(place, family, folder, seed)
    row |= {"family": family, "healthy": place.healthy}
    try:
        patient, trial = place.trial(folder)
    except UserError as error:
        words = str(error)
        names = [*row.get("causes", ()), *row.pop("names", ())]
        return row | {"kind": "harmful", "verdict": "refused", "reason": words, "seconds": 0.0,
                      "is_right": any(name in words for name in names)}  # fmt: skip
    trial = trial if fed is None else fed(trial)
    row["acceptance"] = score(trial, place.others, K).acceptance
    row["lost"] = 1 - row["acceptance"] / place.healthy
    row["kind"] = kind_of(family, row["lost"])
    if row["kind"] in ("mild", "not harmless"):
        return row
    start = time.process_time()  # on one core: other work on the machine does not count
    found = conclude(patient, trial, place.texts, expected=None)
    row["seconds"] = time.process_time() - start
    row |= as_row(found, row)
    damage = found.judgement.damage
    alone = judge(found.diagnosis, None, damage.oddities, lambda: damage.parts)
    row["nothing_expected"] = alone.verdict
    with_card = conclude(patient, trial, place.texts, expected=place.card, known=found)
    return row | {"with_card": as_row(with_card, row)}


def kind_of(family: str, lost: float) -> str:
    if family == "harmless":
        return "harmless" if lost <= HARMFUL else "not harmless"
    return "harmful" if lost > HARMFUL else "mild"


def as_row(found: Conclusion, truth: Row) -> Row:
    """The verdict and whether it is right."""
    judgement = found.judgement
    cause = judgement.repairs[0].change.cause if judgement.repairs else None
    where = judgement.damage.module if judgement.verdict == "weights" else None
    wanted = {"harmless": "healthy"}.get(truth["family"], truth["family"])
    is_named = cause in truth.get("causes", ())
    is_located = where is not None and module(where) in truth.get("modules", ())
    gains = [1.0 if r.scores is None else r.scores.acceptance for r in judgement.repairs]
    return {
        "verdict": judgement.verdict,
        "cause": cause,
        "tried": [repair.change.tried for repair in judgement.repairs],
        "repaired": gains,
        "base": found.diagnosis.base.acceptance,
        "module": where,
        "parts": [
            (p.module, p.acceptance, p.drafts, p.probability) for p in judgement.damage.parts
        ],
        "best": [
            (each.change.cause, each.change.tried, each.scores.acceptance)
            for each in found.diagnosis.rounds[0][:3]
            if each.scores is not None
        ],
        "evidence": found.words,
        "is_right": judgement.verdict == wanted or (truth["family"] == "weights" and is_named),
        "is_exact": is_named or is_located or truth["family"] in ("weak", "harmless"),
    }


# ------------------------------------------------------------------ the trial


def run_round(task: tuple[int, int, int, dict[str, int]], out: Path) -> int:
    """All draws of one drafter in a round; rows that `out` holds are not drawn again."""
    seed, number, turn, quotas = task
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    target, method = PAIRS[number]
    done = {tuple(row["draw"]): row for row in read(out)}
    count = 0
    with ward(target, method) as place:
        for family, quota in quotas.items():
            counted = 0
            for index in range(MOST_DRAWS * quota):
                if counted == quota:
                    break
                draw = (number, turn, list(QUOTAS).index(family), index)
                row = done.get((seed, *draw))
                if row is None:
                    with tempfile.TemporaryDirectory() as folder:
                        row = attempted(place, family, (seed, *draw), Path(folder) / "drafter")
                    row |= {"draw": [seed, *draw], "target": target, "method": method}
                    with out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                counted += row["kind"] in ("harmful", "harmless")
                count += 1
    return count


def attempted(place: Ward, family: str, seed: tuple[int, ...], folder: Path) -> Row:
    """A draw; an exception of the doctor's is a wrong verdict."""
    try:
        return judged(place, family, seed, folder)
    except Exception:
        return {"family": family, "says": "", "kind": "harmful", "verdict": "exception",
                "reason": traceback.format_exc(), "is_right": False}  # fmt: skip


def read(out: Path) -> list[Row]:
    """The rows of a file; a line that was cut is left out."""
    if not out.exists():
        return []
    found = []
    for line in out.read_text().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def seed_of(text: str) -> int:
    """A number, or the hash of the last commit that touches the doctor."""
    if text != "auto":
        return int(text)
    command = ["git", "log", "-1", "--format=%H", "--", DOCTOR]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(found.stdout[:12], 16)


def main() -> None:
    """Run the trial that sys.argv names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default="auto", help="a small number, or auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--pairs", help="numbers of PAIRS, such as 0,3")
    parser.add_argument("--quotas", help="such as convention=1,weak=1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the table of a file, no more")
    args = parser.parse_args()
    seed = seed_of(args.seed)
    quotas = QUOTAS
    if args.quotas:
        quotas = {k: int(v) for k, v in (part.split("=") for part in args.quotas.split(","))}
    numbers = map(int, args.pairs.split(",")) if args.pairs else range(len(PAIRS))
    pairs = list(numbers)
    tasks = [(seed, number, turn, quotas) for turn in range(args.rounds) for number in pairs]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.table:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(run_round, task, args.out) for task in tasks]):
                done.result()
    show([row for row in read(args.out) if row["draw"][0] == seed])


if __name__ == "__main__":
    main()
