"""Convert between checkpoints and Hugging Face folders.

    python tools/checkpoint/convert.py to-hf --load CKPT --save DIR [--iteration N]
    python tools/checkpoint/convert.py to-megatron --load DIR_OR_HUB_ID --save CKPT [--revision R]

Both compare the logits of the two models before anything appears at --save (--no-verify skips it).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

# Last: this folder's inspect.py must not stand for Python's own module of that name.
sys.path.sort(key=str(Path(__file__).resolve().parent).__eq__)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import BadInput, require, run_main


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = _Parser(prog="convert.py", description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(dest="way", required=True, parser_class=_Parser)
    to_hf = ways.add_parser("to-hf", help="checkpoint -> Hugging Face folder")
    to_hf.add_argument("--load", required=True, help="checkpoint or iteration folder")
    to_hf.add_argument("--save", required=True, help="new Hugging Face folder")
    to_hf.add_argument("--iteration", type=int, help="default: the latest")
    to_hf.add_argument("--max-shard-size", default="5GB", help="as in 5GB or 200MB")
    to_megatron = ways.add_parser("to-megatron", help="Hugging Face folder -> checkpoint")
    to_megatron.add_argument("--load", required=True, help="folder or hub id")
    to_megatron.add_argument("--save", required=True, help="checkpoint folder (gets release/)")
    to_megatron.add_argument("--revision", help="branch, tag or commit of a hub id")
    to_megatron.add_argument(
        "--rename",
        metavar="THEIRS=OURS",
        nargs="+",
        action="extend",
        default=[],
        help="replace text in names of tensors, for checkpoints whose names differ",
    )
    to_megatron.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that a scaled model of somebody else's brings, to compare with it",
    )
    for way in (to_hf, to_megatron):
        way.add_argument("--dtype", default="keep", choices=["keep", "bf16", "fp32"])
        way.add_argument(
            "--set",
            dest="settings",
            metavar="KEY=VALUE",
            nargs="+",
            action="extend",
            default=[],
            help="change the configuration on the way, by Hugging Face's key names",
        )
        way.add_argument("--family", help="model family; default: from the configuration")
        way.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True)
        way.add_argument("--force", action="store_true", help="replace what an earlier run wrote")
        way.add_argument(
            "--workers", type=int, help="threads that read and write; default: the cores, up to 4"
        )
        way.add_argument(
            "--progress",
            action=argparse.BooleanOptionalAction,
            help="a bar on stderr; default: on a terminal",
        )
    return parser.parse_args(argv)


def main() -> int:
    """Run one conversion; 1 if the two models differ."""
    args = parse_arguments()
    require(
        args.workers is None or args.workers >= 1,
        f"--workers: found {args.workers}; allowed: 1 or more",
    )
    # PyTorch then asks the kernel for large pages: fresh memory costs more than copying to it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from megatron_lengen.convert.families import parse_renames, parse_settings
    from megatron_lengen.convert.stream import Pace, default_workers, free_at_once
    from megatron_lengen.convert.verify import VerificationError

    free_at_once()
    common = {
        "dtype": args.dtype,
        "settings": parse_settings(args.settings),
        "verify": args.verify,
        "force": args.force,
        "family": args.family,
        "pace": Pace(args.workers or default_workers(), args.progress),
    }
    try:
        if args.way == "to-hf":
            from megatron_lengen.convert.hf_folder import parse_size
            from megatron_lengen.convert.to_hf import checkpoint_to_hf

            size = parse_size(args.max_shard_size)
            checkpoint_to_hf(args.load, args.save, args.iteration, max_shard_bytes=size, **common)
        else:
            from megatron_lengen.convert.to_megatron import hf_to_checkpoint

            hf_to_checkpoint(
                args.load,
                args.save,
                revision=args.revision,
                renames=parse_renames(args.rename),
                trust_remote_code=args.trust_remote_code,
                **common,
            )
    except VerificationError as error:
        print(f"error: {error}; nothing was written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
