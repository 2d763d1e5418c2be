"""The `easel` command. Every setting is a flag of `easel serve`, made from the fields of `Settings`.

The flags hand their texts on as they are: `Settings` alone converts and judges, so a flag, a variable and a line of
YAML mean the same. Whatever needs torch is imported by the command that needs it, and `--help` stays instant.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from app.logs import configure
from app.output import checked_stdout
from app.settings import Settings, SettingsError, load_settings, split_commas

logger = logging.getLogger(__name__)

SERVE_FLAGS = tuple(name for name in Settings.model_fields if name != "model")
WEIGHT_FLAGS = (
    "transformer_dtype", "text_encoder_dtype", "fp8_ignored_layers", "fp8_first_blocks", "fp8_last_blocks",
)  # fmt: skip
GENERATE_FLAGS = (
    "config", "device", "dtype", *WEIGHT_FLAGS, "fp8_first_steps", "fp8_last_steps", "prefix_kv_dtype", "offload",
    "vae_tiling", "log_level",
)  # fmt: skip
DOCTOR_FLAGS = (
    "config", "device", "dtype", "transformer_dtype", "text_encoder_dtype", "fp8_first_steps", "fp8_last_steps",
    "offload", "vae_tiling", "max_output_pixels", "log_level",
)  # fmt: skip
QUANTIZE_FLAGS = ("config", *WEIGHT_FLAGS, "log_level")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exit status: 1 for what can't be done, 2 for a malformed command line, 130 for Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        settings = load_settings(**{name: value for name, value in vars(args).items() if name in Settings.model_fields})
    except SettingsError as error:
        raise SystemExit(f"easel: {error}") from error
    configure(settings.log_level, settings.log_format)
    try:
        with checked_stdout():
            run(args, settings)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        if settings.log_format == "json" and isinstance(end.code, str):  # which Python would print as it is
            logger.critical("%s", end.code)
            sys.exit(1)
        raise


def run(args: argparse.Namespace, settings: Settings) -> None:
    """The command that `args` names."""
    if args.command == "serve":
        from app.launch import launch

        launch(settings)
    elif args.command == "eval":
        from app.evaluation.run import evaluate

        evaluate(args, settings)
    elif args.command == "quantize":
        from app.quantize import quantize

        quantize(args, settings)
    elif args.command == "doctor":
        from app.doctor import examine

        examine(settings)
    else:
        from app.offline import generate

        generate(args, settings)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="easel", description="Qwen-Image-2.1 behind OpenAI's image API.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"easel {version('easel')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve_parser = commands.add_parser(
        "serve",
        help="run the service",
        description="Run the service. Each flag is also a variable (--max-queue is EASEL_MAX_QUEUE) and a key of the "
        "YAML file that --config names (max_queue). A flag beats a variable, a variable the file.",
        usage="easel serve [MODEL] [flags]",
        allow_abbrev=False,
    )
    add_settings(serve_parser, SERVE_FLAGS)

    generate_parser = commands.add_parser(
        "generate",
        help="draw pictures in this process, without a service",
        description="Draw pictures in this process, without a service. The EASEL_… variables hold here too.",
        usage="easel generate [MODEL] --prompt TEXT -o FILE [flags]",
        allow_abbrev=False,
    )
    add_request(generate_parser)
    add_settings(generate_parser, GENERATE_FLAGS)

    quantize_parser = commands.add_parser(
        "quantize",
        help="write a checkpoint with its networks in FP8",
        description="Write a checkpoint with its networks in FP8: both, or the one whose type is given as fp8.",
        usage="easel quantize [MODEL] -o FOLDER [flags]",
        allow_abbrev=False,
    )
    quantize_parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="A new folder.")
    add_settings(quantize_parser, QUANTIZE_FLAGS)

    doctor_parser = commands.add_parser(
        "doctor",
        help="say what fits this machine, and with which flags",
        description="Say what this machine has, how much memory a model takes, and with which flags it fits.",
        usage="easel doctor [MODEL] [flags]",
        allow_abbrev=False,
    )
    add_settings(doctor_parser, DOCTOR_FLAGS)

    eval_parser = commands.add_parser(
        "eval",
        help="measure how well a checkpoint of the demo's kind draws what it is asked for",
        description="Draw held-out prompts and edits of the demo's world of shapes and judge the pictures.",
        usage="easel eval [MODEL] [flags]",
        allow_abbrev=False,
    )
    eval_parser.add_argument("--prompts", type=int, default=500, metavar="N", help="Pictures from a prompt. [500]")
    eval_parser.add_argument("--edits", type=int, default=180, metavar="N", help="Edits of pictures. [180]")
    eval_parser.add_argument("--seed", type=int, default=99, metavar="N", help="Of the prompts and pictures. [99]")
    eval_parser.add_argument("--steps", type=int, metavar="N", help="Denoise steps; the default is the checkpoint's.")
    eval_parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="A json file to write.")
    add_settings(eval_parser, GENERATE_FLAGS)
    return parser


def add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Give `parser` the model as a positional argument or a flag, and a flag for each of the other settings `names`.

    A flag that isn't given leaves no attribute behind, so that it doesn't hide a variable.
    """
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=Settings.model_fields["model"].description
    )
    model.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help="The same, as a flag.")
    for name in names:
        field = Settings.model_fields[name]
        many = get_origin(field.annotation) is tuple
        parser.add_argument(
            flag_of(name),
            dest=name,
            action="extend" if many else "store",
            type=split_commas if many else str,
            choices=get_args(field.annotation) if get_origin(field.annotation) is Literal else None,
            default=argparse.SUPPRESS,
            help=help_of(field),
        )


def add_request(parser: argparse.ArgumentParser) -> None:
    """The fields of one request, judged later by the schema of the HTTP API."""
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="What to draw, or what to change.")
    parser.add_argument("--negative-prompt", metavar="TEXT", help="What to keep out; needs --true-cfg-scale above 1.")
    parser.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE", help="Input picture; repeat for up to four."
    )
    parser.add_argument("--size", metavar="WxH", help="Exact size of the output; the default follows the input.")
    parser.add_argument(
        "--resolution", type=int, metavar="N", help="Area of input and output, as the side of a square."
    )
    parser.add_argument("--steps", type=int, metavar="N", help="Denoise steps; the default is the checkpoint's.")
    parser.add_argument("--seed", type=int, metavar="N", help="Picture i uses seed + i; random by default.")
    parser.add_argument("--true-cfg-scale", type=float, metavar="X", help="Guidance; 1 is none.")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="Number of pictures.")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="A png, webp or jpeg file to write."
    )


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def help_of(field: FieldInfo) -> str:
    """The description, with the default where there is one to show."""
    text = f"{field.description}".replace("%", "%%")
    if get_origin(field.annotation) is tuple:
        text += " Repeat it, or separate with commas."
    if field.default in (None, ()):
        return text
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"{text} [{default}]"
