#!/usr/bin/env python3
"""Train a Mamba2 model: `python pretrain_mamba.py --help`, or under torchrun for many processes."""

from megatron_lengen.errors import run_main
from megatron_lengen.training.arguments import parse_settings, print_settings


def main() -> None:
    """Parse, check, train."""
    settings = parse_settings(None, __doc__, decoder="mamba2")
    if settings.training.dry_run:
        print_settings(settings)
        return
    # Imported after the checks: building models is slow to import and bad flags need none of it.
    from megatron_lengen.models.build import build_chunks
    from megatron_lengen.training.loop import train

    train(settings, build_chunks)


if __name__ == "__main__":
    run_main(main)
