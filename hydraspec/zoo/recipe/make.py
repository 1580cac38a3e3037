"""Make the zoo: `python -m hydraspec.zoo.recipe.make COMMAND --name NAME`.

Each command reads what the earlier ones wrote, is seeded, and writes into `--out` (default: the
package's own `checkpoints/` folder). Training runs on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.logging import RichHandler
from transformers import PreTrainedTokenizerFast

from hydraspec.models.checkpoint.twins import TWINS, write_twin
from hydraspec.zoo.recipe import (
    assistant_recipes,
    block_files,
    block_recipes,
    corpus,
    distil,
    draft_files,
    editing,
    evaluate,
    make_pictured,
    modeling,
    quantise,
    recipes,
    tasks,
    tokenizer,
    train_assistant,
    train_block,
    train_drafter,
    train_target,
)
from hydraspec.zoo.recipe.batches import Sequences, generate_sequences

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TARGET_DATA_SEED, ASSISTANT_DATA_SEED = 1, 2
TARGET_EXAMPLES, DISTILLED_EXAMPLES, ASSISTANT_EXAMPLES = 400_000, 20_000, 50_000
CALIBRATION_EXAMPLES = 128
CONTINUED_TARGET_EXAMPLES, CONTINUED_EXAMPLES = 20_000, 1_000  # training goes on from weights
console = Console()


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def _stop_tokens(tokens: PreTrainedTokenizerFast) -> list[int]:
    names = [tokenizer.EOS, tokenizer.TURN_END]
    return [tokens.convert_tokens_to_ids(name) for name in names]


def _data(args: argparse.Namespace, count: int, seed: int) -> Sequences:
    data = generate_sequences(args.out / args.name, count, seed)
    return data.to(torch.device(args.device))


def make_corpus(args: argparse.Namespace) -> None:
    """Write the held-out workloads and show one example a category."""
    corpus.write_workload()
    editing.write()
    for example in itertools.islice(corpus.training_examples(0), len(tasks.TASKS)):
        console.print(f"[bold]{example.category}[/]", example.prompt, example.response, sep="\n")


def make_tokenizer(args: argparse.Namespace) -> None:
    """Train the tokenizer (the same for every name) into the target's folder."""
    tokenizer.save_tokenizer(tokenizer.train_tokenizer(), args.out / args.name)


def make_target(args: argparse.Namespace) -> None:
    """Train a target, whose tokenizer must have been made, and its teacher if it has one."""
    folder, recipe = args.out / args.name, recipes.TARGETS[args.name]
    if recipe.teacher is not None:
        model = distil.distil_target(
            recipe,
            modeling.load_target(args.out / recipe.teacher, args.device),
            _data(args, DISTILLED_EXAMPLES, TARGET_DATA_SEED),
            title=args.name,
        )
    else:
        examples = TARGET_EXAMPLES if recipe.start is None else CONTINUED_TARGET_EXAMPLES
        model = train_target.train_target(
            recipe,
            _data(args, examples, TARGET_DATA_SEED),
            title=args.name,
            compiled=args.compile,
            max_seconds=args.max_seconds,
        )
    train_target.save_target(model, folder, _stop_tokens(_load_tokenizer(folder)))


def make_assistant(args: argparse.Namespace) -> None:
    """Train an assistant, whose target must have been made."""
    folder = args.out / f"{args.name}-assistant"
    target = modeling.load_target(args.out / args.name, args.device)
    assistant = train_assistant.train_assistant(
        assistant_recipes.ASSISTANTS[args.name],
        target,
        _data(args, ASSISTANT_EXAMPLES, ASSISTANT_DATA_SEED),
        title=folder.name,
    )
    source = args.out / args.name
    modeling.save_checkpoint(assistant, folder, _stop_tokens(_load_tokenizer(source)))
    for name in TOKENIZER_FILES:
        shutil.copy(source / name, folder / name)


def make_drafters(args: argparse.Namespace) -> None:
    """Train a target's drafters with their own KV, or --drafter alone; the target must be made."""
    target = modeling.load_target(args.out / args.name, args.device)
    blocks = _block_drafters(args)
    seen = {(block.num_texts, block.aux_layer_ids) for block in blocks.values()}
    for count, aux_layer_ids in seen:
        texts = _data(args, count, ASSISTANT_DATA_SEED)
        kept = train_drafter.keep_states(target, texts, aux_layer_ids)
        for name, block in blocks.items():
            if (block.num_texts, block.aux_layer_ids) == (count, aux_layer_ids):
                made = train_block.train_block(block, target, texts, title=name, kept=kept)
                block_files.save_block(made, block, target, args.out / name)
    chosen = _drafters(args)
    if not chosen:
        return
    is_continued = all(recipe.start is not None for recipe in chosen.values())
    examples = CONTINUED_EXAMPLES if is_continued else ASSISTANT_EXAMPLES
    data = _data(args, examples, ASSISTANT_DATA_SEED)
    for name, recipe in chosen.items():
        weights = None
        if recipe.start is not None:
            first = recipes.DRAFTERS[recipe.start]
            source = draft_files.folder_of(recipe.start, first)
            weights = draft_files.load_head(source, first, target).state_dict()
        head = train_drafter.train_drafter(recipe, target, data, title=name, weights=weights)
        draft_files.save_head(head, recipe, target, draft_files.folder_of(name, recipe, args.out))


def _drafters(args: argparse.Namespace) -> dict[str, recipes.DraftRecipe]:
    found = {n: r for n, r in recipes.DRAFTERS.items() if r.target == args.name}
    return {n: r for n, r in found.items() if args.drafter in (None, n)}


def _block_drafters(args: argparse.Namespace) -> dict[str, block_recipes.BlockRecipe]:
    found = {n: r for n, r in block_recipes.BLOCK_DRAFTERS.items() if r.target == args.name}
    return {n: r for n, r in found.items() if args.drafter in (None, n)}


def make_evaluation(args: argparse.Namespace) -> None:
    """Print exact match and every drafter's acceptance on held-out prompts."""
    target: Any = modeling.load_target(args.out / args.name, args.device)
    lines = [json.loads(line) for line in corpus.workload_lines(args.per_category)]
    tokens = _load_tokenizer(args.out / args.name)
    drafters: dict[str, evaluate.DraftRows] = {}
    folder = args.out / f"{args.name}-assistant"
    if folder.exists():
        assistant = modeling.load_assistant(folder, args.device)
        drafters[folder.name] = evaluate.by_assistant(target, assistant)
    for name, recipe in _drafters(args).items():
        path = draft_files.folder_of(name, recipe, args.out)
        if path.exists():
            head = draft_files.load_head(path, recipe, target)
            drafters[name] = evaluate.by_head(target, head, recipe.aux_layer_ids)
    for name, block in _block_drafters(args).items():
        if (args.out / name).exists():
            made = block_files.load_block(args.out / name, block, target)
            drafters[name] = evaluate.by_block(target, made, block.aux_layer_ids)
    result = evaluate.evaluate(target, drafters, tokens, k=args.k, workload=lines)
    console.print_json(json.dumps({"name": args.name, "k": args.k, **result}))


def make_input_scales(args: argparse.Namespace) -> None:
    """Calibrate the static scales of a target's inputs, and of its EAGLE head's."""
    target = modeling.load_target(args.out / args.name, args.device)
    data = _data(args, CALIBRATION_EXAMPLES, ASSISTANT_DATA_SEED)
    for name, recipe in _drafters(args).items():
        head = draft_files.load_head(draft_files.folder_of(name, recipe, args.out), recipe, target)
        found = quantise.calibrate(target, head, data)
        quantise.save_scales(dict(zip((args.name, name), found, strict=True)))


def make_twin(args: argparse.Namespace) -> None:
    """Write a quantised twin's folder into --out, to look at or to give to other engines."""
    write_twin(args.twin, args.out / args.twin)


def make_pictures(args: argparse.Namespace) -> None:
    """Make the target that reads pictures and its drafters, or these alone."""
    device = torch.device(args.device)
    if args.drafters_only:
        make_pictured.make_drafters(args.out, device)
    else:
        console.print_json(json.dumps(make_pictured.make(args.out, device)))


COMMANDS = {
    "corpus": make_corpus,
    "tokenizer": make_tokenizer,
    "target": make_target,
    "assistant": make_assistant,
    "drafters": make_drafters,
    "evaluate": make_evaluation,
    "input-scales": make_input_scales,
    "twin": make_twin,
    "pictures": make_pictures,
}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--name", choices=recipes.TARGETS, default="tiny_gemma4")
    parser.add_argument(
        "--drafter",
        choices=[*recipes.DRAFTERS, *block_recipes.BLOCK_DRAFTERS],
        help="only this one",
    )
    parser.add_argument("--twin", choices=TWINS, help="the folder that the command twin writes")
    parser.add_argument("--drafters-only", action="store_true", help="pictures: no target")
    parser.add_argument("--out", type=Path, default=recipes.CHECKPOINTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-seconds", type=float, help="shorten a target's training to this")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--per-category", type=int, default=corpus.WORKLOAD_PER_CATEGORY)
    parser.add_argument("-k", type=int, default=3, help="drafts a step in the evaluation")
    return parser.parse_args()


def main() -> None:
    """Run the command that sys.argv names."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler()])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    args = _parse()
    COMMANDS[args.command](args)


if __name__ == "__main__":
    main()
