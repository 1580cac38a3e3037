"""The byte-level BPE tokenizer of the zoo: its training, chat template and special tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hydraspec.zoo.recipe.corpus import Example, training_examples

VOCAB_SIZE = 768
PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
TURN_START, TURN_END = "<|turn>", "<turn|>"
# Ids 0..5; the first three are those of Gemma.
SPECIAL_TOKENS = (PAD, EOS, BOS, UNKNOWN, TURN_START, TURN_END)
TOKENIZER_SEED = 10_000
TOKENIZER_EXAMPLES = 40_000

# A turn is "<|turn>role\ntext<turn|>\n"; the assistant's role is spelled "model", as in Gemma 4.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<|turn>' + role + '\n' + message['content'] | trim + '<turn|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}"
)

# Digits stand alone; a word takes its leading space along; runs of spaces keep together.
SPLIT_PATTERN = r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\n *| +"


def train_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `TOKENIZER_EXAMPLES` training examples, deterministically."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    examples = itertools.islice(training_examples(TOKENIZER_SEED), TOKENIZER_EXAMPLES)
    texts = itertools.chain.from_iterable(
        (e.prompt, e.response, "model\n", "user\n") for e in examples
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        extra_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))


def render_prompt(prompt: str) -> str:
    """The text of one user turn in the chat template, without the tokenizer (a test compares)."""
    return f"{BOS}{TURN_START}user\n{prompt.strip()}{TURN_END}\n{TURN_START}model\n"


def encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], list[int]]:
    """Token ids of the rendered prompt and of the response with its closing turn marker."""
    prompt = tokenizer(render_prompt(example.prompt), add_special_tokens=False)["input_ids"]
    response = tokenizer(f"{example.response}{TURN_END}\n", add_special_tokens=False)["input_ids"]
    return list(prompt), list(response)
