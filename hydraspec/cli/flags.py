"""The flags of the command line, which may stand anywhere: ours, and those that Hydra answers."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from hydra import version as hydra_version
from hydra._internal.utils import _run_hydra, get_args_parser

from hydraspec.cli.compose import CONFIG_MODULE, CONFIG_NAME
from hydraspec.cli.overrides import (
    check_keys,
    for_hydra,
    parse,
    search_places,
    with_config_dir,
    with_method,
)
from hydraspec.config.messages import nearest
from hydraspec.errors import ConfigurationError
from hydraspec.version import __version__


def read_flags(argv: Sequence[str], own: Sequence[str] = ()) -> Namespace:
    """Parse flags and overrides into the names of Hydra's parser; `own` are further flags of the
    command, parsed before, which messages may propose.

    Raises:
        ConfigurationError: for unknown flags and those that exclude each other.
        SystemExit: after --version.
    """
    parser = _parser()
    args, unknown = parser.parse_known_intermixed_args(list(argv))
    flags = [*own, *(flag for action in parser._actions for flag in action.option_strings)]
    for flag in unknown:
        meant = nearest(flag, flags)
        raise ConfigurationError(
            f"{flag}: unknown flag\n  allowed: group=choice, key=value, and the flags of --help\n"
            f"  to do: {f'did you mean {meant}?' if meant else 'remove it'}"
        )
    _refuse_flags(args)
    args.config_name = args.config_name or CONFIG_NAME
    # Kept as flag and as override: Hydra's printing of text reads the flag, runs the override.
    args.overrides = with_config_dir(args.config_dir, args.overrides)
    return args


def read_keys(
    argv: Sequence[str], problem: str, *, sweeps: bool = False, own: Sequence[str] = ()
) -> Namespace:
    """Parse flags and overrides of a command that takes the keys of a run, and -m if it `sweeps`;
    `own` as in `read_flags`.

    Raises:
        ConfigurationError: with `problem`, if there is another flag of a run.
    """
    args = read_flags(argv, own)
    if only_shows(args) or args.config_name != CONFIG_NAME or (args.multirun and not sweeps):
        raise ConfigurationError(
            f"{' '.join(argv)}: {problem}\n"
            f"  allowed: group=choice, key=value, {'-m ' * sweeps}and --config-dir\n"
            "  to do: leave the flag out; python -m hydraspec has it"
        )
    return args


def only_shows(args: Namespace) -> bool:
    """Returns whether a flag asks for text in place of a run."""
    return any((args.help, args.hydra_help, args.cfg, args.info, args.shell_completion))


def show(args: Namespace) -> None:
    """Have Hydra print what a flag asks for: configuration, help, information, shell completion.

    Raises:
        ConfigurationError: for a key that does not exist.
        SystemExit: after --help and --hydra-help.
    """
    if not args.shell_completion:  # its arguments are no overrides
        search_places(args.overrides)
        args.overrides = with_method(args.overrides)
        typed = parse(args.overrides)
        check_keys(typed)
        args.overrides = [for_hydra(override) for override in typed]
    hydra_version.setbase("1.3")
    _run_hydra(args, _parser(), lambda cfg: None, f"pkg://{CONFIG_MODULE}", CONFIG_NAME)


def _parser() -> ArgumentParser:
    parser = get_args_parser()
    (action,) = (action for action in parser._actions if action.dest == "version")
    vars(action)["version"] = f"hydraspec {__version__}"  # ours, not Hydra's
    return parser


def _refuse_flags(args: Namespace) -> None:
    if args.help or args.hydra_help:
        return
    asked = {
        "--run": args.run,
        "--multirun": args.multirun,
        "--cfg": args.cfg,
        "--info": args.info,
        "--shell-completion": args.shell_completion,
    }
    given = [flag for flag, value in asked.items() if value]
    if len(given) > 1:
        raise ConfigurationError(
            f"{' '.join(given)}: flags that exclude each other\n"
            f"  allowed: one of {', '.join(asked)}\n  to do: leave the others out"
        )
    if args.experimental_rerun:
        raise ConfigurationError(
            "--experimental-rerun: is not available: it would run what a pickle holds\n"
            "  allowed: group=choice, key=value, and the other flags of --help\n"
            "  to do: type again what the run folder's overrides.yaml lists"
        )
    if args.resolve and not args.cfg:
        raise ConfigurationError(
            "--resolve: a flag of --cfg\n  allowed: --cfg job --resolve\n  to do: add --cfg job"
        )
    if args.config_path and not only_shows(args):
        raise ConfigurationError(
            "--config-path: is not available for a run, whose configuration ships with the "
            "package\n  allowed: --config-dir=<folder> adds choices, --config-name names a primary "
            "file among them\n  to do: use --config-dir"
        )
