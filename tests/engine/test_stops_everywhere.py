"""Ends inside a draft window in graphs, on ranks and stages, behind pictures, under grammars, at
the end of a reasoning section, and of samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from graph_runs import attention_as_on_devices, graph_config, make_graph_engine
from grids import slow_unless
from recorded_graphs import RecordedOps
from thread_ranks import as_ranks
from window_ends import LENGTH, Whole, check_ends, decoded, whole, with_sampling
from zoo_engines import DRAFTERS, engine_of

from hydraspec.cli.compose import plan
from hydraspec.config.schema import Device, Dtype
from hydraspec.engine.native import NativeEngine
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.parallel.layout import Layout
from hydraspec.types import Request, SamplingParams, Structured
from hydraspec.workloads.reading import read

TEXT = "Write a function sum_pens that goes over pens and sums them up in value."
IN_EVERY_SUITE = ("gemma4_mtp", "dflash")
SOME = slow_unless(lambda method: method in IN_EVERY_SUITE, [(method,) for method in DRAFTERS])
LETTERS = Structured("regex", "([a-z]{1,7} ){40}")


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    engine_of.cache_clear()


def asked(structured: Structured | None = None) -> Request:
    sampling = SamplingParams(structured=structured)
    messages = [{"role": "user", "content": TEXT}]
    return Request(index=0, id="0", sampling=sampling, messages=messages)


# -------------------------------------------------------------------------------- graphs and ranks


@cache
def said(method: str) -> Whole:
    """What the target of a method says, in eager steps without drafts."""
    config = graph_config(method, "none")
    config.method = graph_config("none", "none").method
    return whole(NativeEngine(config), asked())


@pytest.mark.parametrize(
    ("method", "mode"),
    slow_unless(
        lambda *case: case == ("eagle3", "full_and_piecewise"),
        [
            (method, mode)
            for method in ("eagle3", "gemma4_mtp", "dflash", "mtp")
            for mode in ("full_and_piecewise", "full", "full_decode_only", "piecewise")
        ],
    ),
)
def test_graphs_end_where_the_whole_text_says(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_as_on_devices(monkeypatch)
    config = graph_config(method, mode, max_model_len=80, sizes=(5,))
    config.engine.async_scheduling = True
    engine = make_graph_engine(config, RecordedOps())
    assert check_ends(engine, asked(), said(method)) > 0


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("method", ["eagle3", "gemma4_mtp"])
def test_graphs_of_a_device_end_where_the_whole_text_says(method: str) -> None:
    """The CPU's tokens in float32, with all ends in graphs."""
    config = graph_config(method, "full_and_piecewise", device=Device.cuda, dtype=Dtype.float32)
    assert check_ends(make_graph_engine(config, None), asked(), said(method)) > 0


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)], ids=["tp2", "pp2"])
def test_ranks_end_where_the_whole_text_says(layout: Layout) -> None:
    config = graph_config("eagle3", "none")
    cut = as_ranks(layout, lambda ranks: check_ends(NativeEngine(config), asked(), said("eagle3")))
    assert set(cut) != {0}


@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle3"])
def test_answers_about_pictures_end_where_the_whole_text_says(method: str) -> None:
    target = "tiny_gemma4_images"
    typed = ["workload=images", "workload.num_requests=4", "sampling.max_tokens=20"]
    workload = read(plan([f"target={target}", "method=none", *typed]).jobs[0].config)
    assert workload is not None
    request = workload.requests[-1]
    text = whole(engine_of(target, "none"), request)
    ((ended,), _) = decoded(engine_of(target, "none"), [request])
    assert any(span.kind == "image" for span in ended.spans)
    check_ends(engine_of(target, method), request, text)


# ----------------------------------------------------------------------------------------- grammars


@pytest.mark.parametrize("method", SOME)
def test_outputs_under_a_grammar_end_where_the_whole_text_says(method: str) -> None:
    target = DRAFTERS[method]
    text = whole(engine_of(target, "none"), asked(LETTERS))
    check_ends(engine_of(target, method), asked(LETTERS), text, with_least=False)


@pytest.mark.parametrize("method", SOME)
def test_reasoning_ends_at_its_marker_in_a_window(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free text up to the marker, at every place of a window, then the grammar; tokens that were
    drafted beyond it as free text are not accepted. The section is open at the prompt's end."""
    target, places = DRAFTERS[method], range(3, 11)
    plain, drafting = engine_of(target, "none"), engine_of(target, method)
    free = whole(plain, asked())
    request = asked(LETTERS)
    plain.tokenize([request])
    begin = (request.prompt_token_ids or [])[-1]
    for place in places:
        end = free.tokens[place]
        first = free.tokens.index(end)
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "reasoning_markers", (begin, end))
            sampled = with_sampling(request, max_tokens=LENGTH, ignore_eos=True)
            ((wanted,), _), ((found,), _) = (decoded(e, [sampled]) for e in (plain, drafting))
        assert found.output_token_ids == wanted.output_token_ids
        assert tuple(wanted.output_token_ids[: first + 1]) == free.tokens[: first + 1]
        assert plain.parts.tokenizer is not None
        after = plain.parts.tokenizer.decode(wanted.output_token_ids[first + 1 :])
        assert set(after) <= set("abcdefghijklmnopqrstuvwxyz ")


# ------------------------------------------------------------------------------------------ samples


@pytest.mark.parametrize(
    "method",
    slow_unless(
        lambda method: method in ("eagle3", "gemma4_mtp"),
        [(method,) for method in DRAFTERS if method != "suffix"],
    ),
)
def test_samples_end_where_their_own_text_says(method: str) -> None:
    """Two samples of a prompt, each with its seed: its end changes no token before it. (Not so with
    drafts that depend on what other requests have said: those of method=suffix.)"""
    engine = engine_of(DRAFTERS[method], method, "target.dtype=float64")
    texts = set()
    for seed in range(2):
        request = with_sampling(asked(), temperature=2.5, top_k=40, seed=seed)
        text = whole(engine, request)
        check_ends(engine, request, text, with_least=False)
        texts.add(text.tokens)
    assert len(texts) == 2
