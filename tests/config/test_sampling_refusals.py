"""Wrong uses of the sampling keys: one message each, on the command line and in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hydraspec.cli.compose import plan
from hydraspec.errors import ConfigurationError, WorkloadError
from hydraspec.workloads import reading

TYPED = {  # what is typed → what the message has to say
    "sampling.presence_penalty=2.5": ["presence_penalty=2.5 is out of range", "-2 to 2"],
    "sampling.presence_penalty=nan": ["presence_penalty=nan", "-2 to 2"],
    "sampling.frequency_penalty=-3": ["frequency_penalty=-3", "0 is off"],
    "sampling.frequency_penalty=high": ["frequency_penalty=high is text", "a number"],
    "sampling.repetition_penalty=0": ["repetition_penalty=0", "0.01 to 100", "1 is off"],
    "sampling.repetition_penalty=-1": ["repetition_penalty=-1", "0.01 to 100"],
    "sampling.logit_bias=5": ["logit_bias=5", "a mapping, each value a number"],
    "sampling.logit_bias={5:101}": ["logit_bias.5=101", "-100 to 100", "bad_words bans"],
    "sampling.logit_bias={x:1}": ["logit_bias (token)=x", "whole numbers, 0 to"],
    "sampling.logit_bias={-1:1}": ["logit_bias (token)=-1", "ids of the target's tokenizer"],
    "sampling.logit_bias={5:nan}": ["logit_bias.5=nan", "-100 to 100"],
    "sampling.bad_words=[5]": ["bad_words[0]=5", "a list, each entry a whole number"],
    "sampling.bad_words=[word]": ["bad_words[0]=word is text", "a list, each entry a whole number"],
    "sampling.bad_words=[[]]": ["bad_words[0]=[] is out of range", "1 to 16 token ids"],
    "sampling.bad_words=[[1,-2]]": ["bad_words[0][1]=-2", "whole numbers, 0 to"],
    f"sampling.bad_words=[[{'1,' * 16}1]]": ["sequences of 1 to 16 token ids", "fewer tokens"],
    f"sampling.bad_words=[{'[1],' * 128}[1]]": ["bad_words (entries)=129", "128 sequences at most"],
    "sampling.min_tokens=-1": ["min_tokens=-1", "0 (off) to"],
    "sampling.min_tokens=129": ["min_tokens=129 is more than the most", "0 to 128", "max_tokens"],
    f"sampling.min_tokens=1 sampling.stop_token_ids=[{'1,' * 100}1]": ["100 ids at most"],
    "sampling=stochastic sampling.n=0": ["sampling.n=0", "1 to 1024"],
    "sampling.n=4": ["sampling.n=4", "1 with sampling.temperature=0", "sampling=stochastic"],
    "sampling=stochastic sampling.n=2 workload=random": ["1 with workload=random"],
    "sampling=stochastic sampling.n=2 workload=multi_turn": ["1 with workload=multi_turn"],
    "engine=vllm sampling.bad_words=[[5]]": ["not available with engine=vllm", "engine=native"],
    "engine=vllm sampling.logit_bias={5:1}": ["allowed: {}", "method=none or engine=native"],
    "sampling.logprobs=21": ["logprobs=21", "0 to 20, or null", "0 those of the tokens alone"],
    "sampling.logprobs=-1": ["logprobs=-1", "0 to 20, or null"],
    "sampling.logprobs=true": ["logprobs=true", "a whole number, or null"],
    "sampling.prompt_logprobs=all": ["prompt_logprobs=all is text", "a whole number, or null"],
    "sampling.logprobs_mode=scaled": ["logprobs_mode=scaled is no choice", "processed, raw"],
    "engine=transformers sampling.logprobs=1": ["null with engine=transformers", "engine=native"],
    "engine=vllm sampling.prompt_logprobs=0": ["null with engine=vllm", "leave the key out"],
    "parallelism=pp2 engine.device=cpu sampling.logprobs=1": ["parallelism.pipeline=2", "stages"],
    "sampling.presence_penalties=1": ["did you mean sampling.presence_penalty=1?"],
}


@pytest.mark.parametrize(("typed", "said"), TYPED.items(), ids=TYPED.keys())
def test_what_is_typed_wrong_gets_one_message(typed: str, said: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan(typed.split(" "))
    message = str(caught.value)
    assert caught.value.exit_code == 2
    for part in ("sampling.", "\n  allowed: ", "\n  to do: ", *said):
        assert part in message
    assert message.count("\n") == 2


OUTSIDE = {  # what is typed → the place and the token that the message names
    "sampling.logit_bias={5:1,768:1}": "sampling.logit_bias (token)=768",
    "sampling.bad_words=[[5],[7,900]]": "sampling.bad_words (token)=900",
    "sampling.stop_token_ids=[5,768]": "sampling.stop_token_ids[1]=768",
}


@pytest.mark.parametrize(("typed", "said"), OUTSIDE.items(), ids=OUTSIDE.keys())
def test_ids_outside_the_vocabulary_get_one_message(typed: str, said: str) -> None:
    (job,) = plan([typed]).jobs
    reading.check_configured_ids(job.config, 901)
    with pytest.raises(ConfigurationError) as caught:
        reading.check_configured_ids(job.config, 768)
    assert str(caught.value).startswith(f"{said} is outside the target's vocabulary\n")
    assert "\n  allowed: 0 to 767\n  to do: " in str(caught.value)


@pytest.mark.parametrize("sampling", [{"logit_bias": {"768": 1}}, {"bad_words": [[5, 768]]}])
def test_ids_outside_the_vocabulary_in_a_line_get_one_message(
    tmp_path: Path, sampling: dict[str, Any]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"prompt": "a", "sampling": sampling}))
    (job,) = plan(["workload=jsonl", f"workload.path={path}"]).jobs
    workload = reading.read(job.config)
    assert workload is not None
    with pytest.raises(WorkloadError, match=r"lines.jsonl:1: sampling\.\w+: 768 is outside"):
        workload.check_vocabulary(768)


HOT = {"temperature": 1}
LINES = {  # a line's sampling → what the message has to say
    "presence": ({"presence_penalty": 3}, "presence_penalty: 3 is not allowed; it must be -2 to 2"),
    "frequency": ({"frequency_penalty": "1"}, 'frequency_penalty: "1" is not allowed'),
    "repetition": ({"repetition_penalty": 0}, "must be 0.01 to 100"),
    "bias of a list": ({"logit_bias": [[5, 1]]}, 'an object of biases by token id: {"42": -1.5}'),
    "bias": ({"logit_bias": {"5": -101}}, "logit_bias.5: -101 is not allowed"),
    "bias true": ({"logit_bias": {"5": True}}, "logit_bias.5: true is not allowed"),
    "bias of a word": ({"logit_bias": {"the": 1}}, 'logit_bias (token): "the" is not allowed'),
    "biases": ({"logit_bias": dict.fromkeys(range(1025), 1)}, "1024 entries at most"),
    "words of text": ({"bad_words": ["the"]}, "a list of lists of token ids: [[42], [7, 8]]"),
    "an empty word": ({"bad_words": [[]]}, "bad_words[0]: [] is not allowed"),
    "a word of text": ({"bad_words": [[1, "a"]]}, 'bad_words[0][1]: "a" is not allowed'),
    "least": ({"min_tokens": 9}, "min_tokens: 9 is not allowed; it must be at most max_tokens"),
    "least of a half": ({"min_tokens": 0.5}, "min_tokens: 0.5 is not allowed"),
    "samples at 0": ({"n": 2}, "n: 2 is not allowed; it must be 1 at temperature 0"),
    "samples": ({"n": 1025, **HOT}, "1 to 1024"),
    "logprobs": ({"logprobs": 21}, "logprobs: 21 is not allowed; it must be a whole number, 0 to"),
    "of a prompt": ({"prompt_logprobs": "5"}, 'prompt_logprobs: "5" is not allowed'),
    "mode": ({"logprobs_mode": "raw"}, "unknown key 'sampling.logprobs_mode'"),
    "ends": ({"min_tokens": 1, "stop_token_ids": [*range(101)]}, "100 ids at most with min_tokens"),
}


@pytest.mark.parametrize(("sampling", "said"), LINES.values(), ids=LINES.keys())
def test_a_wrong_line_gets_one_message(tmp_path: Path, sampling: Any, said: str) -> None:
    line = {"prompt": "a", "max_tokens": 8, "sampling": sampling}
    assert said in refused(tmp_path, line)


def test_what_belongs_elsewhere_in_a_line(tmp_path: Path) -> None:
    said = refused(tmp_path, {"prompt": "a", "min_tokens": 1})
    assert "'min_tokens' belongs inside \"sampling\"" in said
    said = refused(tmp_path, {"turns": ["a", "b"], "sampling": {"n": 2, **HOT}})
    assert "sampling.n: 2 is not allowed; it must be 1 in a conversation" in said


def refused(tmp_path: Path, line: Any) -> str:
    """The message on a workload's only line."""
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(line))
    (job,) = plan(["workload=jsonl", f"workload.path={path}"]).jobs
    with pytest.raises(WorkloadError) as caught:
        reading.read(job.config)
    message = str(caught.value)
    assert message.startswith(f"{path}:1: ")
    assert "\n" not in message
    assert caught.value.exit_code == 3
    return message
