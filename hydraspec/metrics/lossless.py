"""The lossless verdict in words, for the console, the page and the last line of a process.

The module is light to import: the command line reads the verdicts of earlier runs too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydraspec.metrics.summary import Lossless

# Verdict → kind (good, bad or neither), headline, what it means.
HEADLINES = {
    "identical": ("good", "Identical", "every greedy output equals the baseline's, token by token"),
    "numerical": ("good", "Numerical", "outputs differ only where the target's two best tie"),
    "diverged": ("bad", "Diverged", "an output differs beyond rounding, or was lost"),
    "not_checked": ("", "Not checked", ""),  # `reason` says why
}
LOW_PRECISION = ("bfloat16", "float16")
EXACT = "float64"  # here alone two orders of summation round an input to the same e4m3 number

IN_ANOTHER_DTYPE = (
    "repeat the run with target.dtype={}: if it diverges there too, rounding is not the cause"
)
WITHOUT_GRAPHS = (
    "repeat the run with cudagraph=none engine.async_scheduling=false, and report both runs"
)
WITH_A_TRACE = "repeat the run with metrics.trace=true, and report its folder"
OTHER_DTYPE = "the target's logits there are NaN or infinite: check the weights and target.dtype"
MORE_VARIED = "sampling.temperature=2 sampling.top_p=1 sampling.top_k=0"  # enough for the zoo
SEE_ERRORS = 'see "error" in requests.jsonl'


def rounds_inputs(quantization: Mapping[str, str] | None, dtype: str) -> bool:
    """Returns whether a target with these schemes by module kind rounds inputs, or keys and values,
    to e4m3 numbers, of which another order of summation may give the neighbour: in every dtype but
    float64."""
    schemes = quantization or {}
    rounds = "kv_cache" in schemes or any(", inputs " in scheme for scheme in schemes.values())
    return dtype != EXACT and rounds


def verdict_words(lossless: Lossless) -> str:
    """The lossless verdict in a sentence, with unchecked requests and the test of sampled ones."""
    num_checked = lossless["num_requests_checked"]
    first = lossless["first_beyond_margin"] or lossless["first_divergence"]
    place = f"request {first['request']} at output token {first['position']}" if first else ""
    diverged = f"an output differs beyond rounding (first: {place})"
    count = lossless["num_failed_with_method_only"]
    if count and lossless["first_beyond_margin"] is None:
        diverged = f"an error in {count} of the requests that the baseline finished"
    outputs = "greedy output" if lossless["num_requests_sampled"] else "output"
    equal = f"all {num_checked} {outputs}s equal"
    if num_checked == 1:
        equal = f"the one {outputs} equals"
    words = {
        "identical": f"identical: {equal} the baseline's, token for token",
        "numerical": "numerical: outputs differ only where the target's two best logits tie "
        f"within rounding (first: {place})",
        "diverged": f"DIVERGED: {diverged}",
        "not_checked": f"not checked ({lossless['reason']})",
    }[lossless["verdict"]]
    return words + _unchecked_words(lossless) + distribution_words(lossless)


def distribution_words(lossless: Lossless) -> str:
    """The result of the test of sampled outputs in words, after "; "; empty if it was not made."""
    if (found := lossless.get("distribution")) is None:
        return ""
    samples = f"{found['num_prompts']} prompts x {found['num_samples']} samples"
    if (says := distribution_says(found)) == "cannot_tell":
        return (
            "; sampled outputs: cannot tell whether they have the baseline's distribution "
            f"({samples} hardly vary; {MORE_VARIED} has them vary)"
        )
    power = ""
    if (told := found["detectable"]) is not None:
        power = (
            f"; a shift of {told:.1%} at each of the first {found['num_tokens']} tokens is told "
            f"with {found['power']:.0%} power"
        )
    words = "the baseline's distribution" if says == "same" else "ANOTHER DISTRIBUTION"
    return f"; sampled outputs have {words} ({samples}, p = {found['p']:.2g}{power})"


def distribution_says(test: Mapping[str, Any]) -> str:
    """The answer of the test: "same", "different" or "cannot_tell". Summaries of older versions say
    "same" for a test without power too, which is read as "cannot_tell"."""
    without_power = test.get("detectable", 0.0) is None
    return "cannot_tell" if test["says"] == "same" and without_power else str(test["says"])


def _unchecked_words(lossless: Lossless) -> str:
    """The numbers in words of requests that were not compared: sampled ones, and later turns whose
    prompts differ; empty if no request was compared."""
    if not lossless["num_requests_checked"]:
        return ""
    words = ""
    if count := lossless["num_requests_sampled"]:
        requests = "1 sampled request is" if count == 1 else f"{count} sampled requests are"
        words += f"; {requests} not checked (drafts keep the distribution, not the tokens)"
    if count := lossless.get("num_turns_not_checked"):
        turns = "1 later turn is" if count == 1 else f"{count} later turns are"
        words += f"; {turns} not checked (an answer before differs, and so does the prompt)"
    return words


def what_diverged(summary: Mapping[str, Any]) -> str:
    """The first difference of a run with the verdict "diverged", its place, and what to do."""
    lossless = summary["lossless"]
    found = lossless["first_beyond_margin"]
    if found is None:
        lost = lossless["num_failed_with_method_only"]
        requests = "1 request" if lost == 1 else f"{lost} requests"
        return f"{requests} ended with an error where the baseline finished: {SEE_ERRORS}"
    num_wrong, num_checked = lossless["num_requests_diverged"], lossless["num_requests_checked"]
    if found["target_margin"] is None:
        margin = "target margin not known"
    else:
        margin = (
            f"target margin {found['target_margin']:.3g}, rounding allows "
            f"{found['allowed_margin']:.3g}"
        )
    return (
        f"request {found['request']} differs from the baseline at output token "
        f"{found['position']} ({num_wrong} of {num_checked} requests differ; {margin}): "
        f"{_what_to_do(summary)}"
    )


def _what_to_do(summary: Mapping[str, Any]) -> str:
    if summary["lossless"]["not_finite_in"] is not None:
        return OTHER_DTYPE
    stored = summary.get("quantization") or {}  # summaries of older versions have none
    if rounds_inputs(stored.get("target"), summary["dtype"]):
        return IN_ANOTHER_DTYPE.format(EXACT)
    if summary["dtype"] in LOW_PRECISION:
        return IN_ANOTHER_DTYPE.format("float32")
    if summary["engine"] == "native" and summary["cudagraph"]["target"] != "none":
        return WITHOUT_GRAPHS
    return WITH_A_TRACE
